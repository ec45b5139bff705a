"""The module that each local rank runs: `python -m tuner.run.rank DIRECTORY`, started by `tuner.run.launch`."""

from tuner.run.launch import plain_result, train_as_rank
from tuner.runtime.worker import main

if __name__ == "__main__":
    main(lambda work: plain_result(train_as_rank(work)))
