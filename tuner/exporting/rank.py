"""The module that each local rank of a run with exports runs, started by `tuner.exporting.launch`."""

from tuner.exporting.launch import train_and_export_as_rank
from tuner.runtime.rank import main

if __name__ == "__main__":
    main(train_and_export_as_rank)
