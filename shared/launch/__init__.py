"""How a run starts: guards, the meeting of its processes, and the Accelerator.

May import: processes and below.
"""
