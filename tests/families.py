"""The families of docs/models.md as tiny models of random weights, and models by type with their batches."""

from types import SimpleNamespace

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
)

CPU, CLASSIFIER, MASKED_LM = torch.device("cpu"), AutoModelForSequenceClassification, AutoModelForMaskedLM
PICTURES = ("deit", "vit")  # classifiers of images
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
DROPOUTS += ("seq_classif_dropout", "classifier_dropout")
NO_DROPOUT = dict.fromkeys(DROPOUTS, 0.0)

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"max_position_embeddings": 64, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
    **{"pad_token_id": 0},
}
DISTILBERT = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 3, "eos_token_id": 3}
LAYERS = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "eos_token_id": 3}
T5 |= {"decoder_start_token_id": 0}
PEGASUS = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in LAYERS.items()}
PEGASUS |= {"d_model": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
PERCEIVER = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_self_attends_per_block": 2, "qk_channels": 16}
PERCEIVER |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 64}
FUNNEL = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1], "num_decoder_layers": 1}
GROUPS = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
FAMILIES = {  # name in the table: model_type and what its config has
    "BERT": ("bert", SIZES),
    "RoBERTa": ("roberta", SIZES),
    "DistilBERT": ("distilbert", DISTILBERT),
    "ELECTRA": ("electra", SIZES | {"embedding_size": 16}),
    "ALBERT": ("albert", SIZES | {"embedding_size": 16}),
    "DeBERTa-v2, v3": ("deberta-v2", SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "XLM-R": ("xlm-roberta", SIZES),
    "CamemBERT": ("camembert", SIZES),
    "MPNet": ("mpnet", SIZES),
    "Longformer": ("longformer", SIZES | {"attention_window": [16, 16]}),
    "BigBird": ("big_bird", SIZES),
    "BigBird-Pegasus": ("bigbird_pegasus", PEGASUS),
    "RoFormer": ("roformer", SIZES | {"embedding_size": 16}),
    "SqueezeBERT": ("squeezebert", SIZES | {"embedding_size": 16} | dict.fromkeys(GROUPS, 1)),
    "FNet": ("fnet", SIZES),
    "Funnel": ("funnel", FUNNEL),
    "Nystromformer": ("nystromformer", SIZES),
    "MobileBERT": ("mobilebert", SIZES | {"embedding_size": 16, "intra_bottleneck_size": 16}),
    "ModernBERT": ("modernbert", SIZES),
    "GPT-2": ("gpt2", GPT2),
    "Llama": ("llama", SIZES | {"num_key_value_heads": 1}),
    "Qwen2": ("qwen2", SIZES | {"num_key_value_heads": 1}),
    "T5": ("t5", T5),
    "XLNet": ("xlnet", {"d_model": 16, "d_inner": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0}),
    "Perceiver": ("perceiver", PERCEIVER),
}


def logits_and_gradients(model, inputs):
    """The logits, and the gradients of the sum of their squares as one vector, by the parameters' names."""
    model.zero_grad()
    logits = model(**inputs).logits
    logits.float().square().sum().backward()
    gradients = {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), torch.cat([gradients[name] for name in sorted(gradients)])


def tiny(auto, family, vocab_size, **more):
    """A model of random weights, large enough that what it sees of a text shows in its logits."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(kind, vocab_size=vocab_size, **sizes | more))
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.mul_(max(1.0, 0.3 / weights.std().item()))
    return model


def accelerator(precision="no"):
    """What `adapt_to_device` reads of an Accelerator."""
    return SimpleNamespace(device=CPU, num_processes=1, is_fsdp2=False, mixed_precision=precision, print=print)


def config_of(kind, **more):
    """The config of a model of this type with three layers, without dropout."""
    sizes = {"hidden_size": 32, "embedding_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 3, "initializer_range": 0.2, "num_labels": 3}
    data = {"vocab_size": 50, "pad_token_id": 0}
    if kind in PICTURES:  # without architectures, a deit has two classes
        data = {"image_size": 16, "patch_size": 4, "architectures": ["DeiTForImageClassification"]}
    return AutoConfig.for_model(kind, **sizes | data | NO_DROPOUT | more)


def small(kind, auto=None, **more):
    """A model of this type with random weights, in training mode; a classifier by default."""
    torch.manual_seed(0)
    auto = auto or (AutoModelForImageClassification if kind in PICTURES else CLASSIFIER)
    return auto.from_config(config_of(kind, **more)).train()


def is_short(model):
    """Whether the last layer of a model computes only the tokens that the head reads."""
    return getattr(model, "last_layer_is_short", False)


def compiled(model):
    """Whether some layers of a model are compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def batch(kind="bert", padded=True):
    """Three images, or three texts, some of which have padding."""
    if kind in PICTURES:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(int(padded)))}
    lengths = torch.tensor([[20], [13], [5]] if padded else [[20], [20], [20]])
    return {"input_ids": torch.arange(60).view(3, 20) % 49 + 1, "attention_mask": (torch.arange(20) < lengths).long()}


class OwnHeadForSequenceClassification(BertForSequenceClassification):
    """A user's own class: BERT with another head."""

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.classifier(self.bert(**inputs).last_hidden_state.mean(1)))
