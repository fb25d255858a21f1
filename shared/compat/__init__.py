"""Private and undocumented interfaces of other libraries, one module per library. The rest of shared/ uses none.

Each function names the interface that it uses. A test in tests/compat fails if an upgrade changes the interface.
"""
