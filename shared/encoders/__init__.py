"""The computation of text encoders: adapters, attention, packed documents, padding and the masked head."""
