"""Imported by the fork server (see fork_server.py): fills a cache of transformers that each exporting run would fill.

The cache compiles a thousand regular expressions, which takes a quarter of the time of a tiny run.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("bert")
