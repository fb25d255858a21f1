"""Private and undocumented interfaces of other libraries, one module per library, used nowhere else in shared/.

Each function names what it uses, and a test in tests/compat names what breaks when an upgrade changes it. Where the
library has a public way to the same result, the function takes it when the private name is missing. This room may
import only shared/errors.py.
"""
