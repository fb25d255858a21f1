"""The cache of prepared data: folders that are complete or absent, made once per machine, by one process or by all."""
