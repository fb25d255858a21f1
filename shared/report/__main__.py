"""Write report.html of a run, finished or not, from the files in its folder: python -m shared.report OUTPUT_DIR"""

import argparse
from pathlib import Path

from shared.report.page import write_report
from shared.run.recipes import run_work

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m shared.report", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("output_dir", type=Path, help="the --output_dir of a run")
    given = parser.parse_args()
    run_work(lambda: print(write_report(given.output_dir)))
