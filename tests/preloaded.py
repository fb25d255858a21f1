"""Imported by the fork server (see fork_server.py), after the slow packages, to make the processes that it forks cheap.

A cache of transformers is filled that each exporting run would fill: it compiles a thousand regular expressions, which
takes a quarter of the time of a tiny run. Garbage collections of the forked processes skip the imported modules:
otherwise, the first one would copy the memory of half a million objects, which takes as long.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("bert")
gc.collect()
gc.freeze()
