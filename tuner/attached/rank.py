"""The module that each local rank of a run runs, started by `tuner.attached.launch`."""

from tuner.attached.launch import train_attached_as_rank
from tuner.runtime.worker import main

if __name__ == "__main__":
    main(train_attached_as_rank)
