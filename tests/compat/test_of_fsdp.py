"""The installed Accelerate has the undocumented attributes that decide on FSDP."""

from importlib.metadata import version

from accelerate.state import AcceleratorState

from shared.compat import of_accelerate

ACCELERATE = f"accelerate {version('accelerate')}"


def test_fsdp_on_a_cpu_has_the_settings_of_the_launcher_also_in_a_new_state(accelerator, monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert not accelerator.is_fsdp2
    of_accelerate.use_fsdp_on_cpu(accelerator)
    AcceleratorState(_from_accelerator=True)  # as `prepare_model` makes one
    assert accelerator.is_fsdp2, f"{ACCELERATE}: distributed_type of the states does not switch FSDP on"
    assert of_accelerate.fsdp_settings(accelerator).reshard_after_forward is False
    assert of_accelerate.fsdp_settings(accelerator).cpu_offload is not None
