"""Print the part of a plan that one rank runs. A launcher starts it once per rank, with RANK and WORLD_SIZE set.

    hpgo plan vgg-19 --cluster dapple-c --global-batch-size 2048 -o plan.json
    torchrun --nproc-per-node 16 examples/rank.py plan.json

It prints the rank's layers, its senders and receivers, and its actions. A training script runs the actions in order and
then sums gradients over the groups in `mine.sums`. See examples/engine.py for such a script.
"""

import os
import sys

import hpgo


def main() -> None:
    """Read the plan named on the command line and print this rank's part of it."""
    if len(sys.argv) != 2 or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        sys.exit("start me as `torchrun … rank.py plan.json`, or with RANK and WORLD_SIZE set")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        plan = hpgo.Plan.read(sys.argv[1])
    except hpgo.errors.HpgoError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    needed = 1 + max(device for stage in plan.stages for device in stage.devices)
    if world_size < needed:
        sys.exit(f"the plan needs {needed} ranks, not {world_size}")
    mine = plan.for_rank(rank)
    # The planner may leave slow devices idle, so a rank may have no stage.
    if mine.is_idle:
        print(f"rank {rank}: idle")
        return
    for stage in mine.stages:
        print(
            f"rank {rank}: stage {stage.stage}, layers {stage.layers[0]} to {stage.layers[-1]},"
            f" samples {stage.rows.start} to {stage.rows.stop - 1} of each of {mine.micro_batches} micro-batches"
        )
        for word, messages in (("receives", stage.receives), ("sends", stage.sends)):
            for one in messages:
                print(f"rank {rank}: {word} samples {one.rows.start} to {one.rows.stop - 1}, rank {one.peer}")
    print(f"rank {rank}: runs {' '.join(f'{action.kind}{action.micro_batch}' for action in mine.actions)}")


if __name__ == "__main__":
    main()
