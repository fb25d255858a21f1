"""report.html: what a run has written, as one page for a browser."""
