"""The module that each local rank runs: `python -m tuner.train.rank DIRECTORY`, started by `tuner.train.launch`."""

from tuner.runtime.rank import main
from tuner.train.launch import plain_result, train_as_rank

if __name__ == "__main__":
    main(lambda work: plain_result(train_as_rank(work)))
