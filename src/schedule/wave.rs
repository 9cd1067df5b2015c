//! Hanayo: waves of micro-batches that run down the ranks and up again, several times.
//!
//! Virtual stages are placed on a zigzag, so that a wave turns at the ends without a transfer. Of the passes that are
//! ready, each rank runs the one that is furthest along the model. At most `under_way` micro-batches are in the
//! pipeline. The order results from running this rule in virtual time, with a backward twice as long as a forward.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Action, Schedule, snake_placement};

// Integer durations make ties exact, so the order does not depend on rounding.
const FORWARD: u64 = 1;
const BACKWARD: u64 = 2;
const NOT_YET: u64 = u64::MAX;

/// Builds Hanayo. `virtual_stages_per_rank` must be even: each wave has two. `under_way` limits the micro-batches
/// between their first forward and their last backward.
pub(super) fn hanayo(ranks: u32, virtual_stages_per_rank: u32, micro_batches: u32, under_way: u32) -> Schedule {
    let mut run = Run::new(ranks, virtual_stages_per_rank, micro_batches, under_way);
    run.run();
    Schedule::of_one_chain("hanayo", micro_batches, run.rank_of_stage, run.action_lists)
}

/// State of the simulation in virtual time. Passes through the model are numbered in order: the forward of stage `s` is
/// `s`, its backward is `2 S - 1 - s`.
struct Run {
    ranks: usize,
    under_way: usize,
    stages: usize,
    micro_batches: usize,
    rank_of_stage: Vec<u32>,
    /// Time at which the input of each pass is available, by `[pass][micro-batch]`.
    ready: Vec<u64>,
    /// Number of micro-batches that have completed each pass.
    done: Vec<usize>,
    free: Vec<u64>,
    action_lists: Vec<Vec<Action>>,
    queue: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Run {
    fn new(ranks: u32, virtual_stages_per_rank: u32, micro_batches: u32, under_way: u32) -> Self {
        let (stages, count) = ((ranks * virtual_stages_per_rank) as usize, micro_batches as usize);
        let mut ready = vec![NOT_YET; 2 * stages * count];
        ready[..count].fill(0);
        Self {
            ranks: ranks as usize,
            under_way: under_way as usize,
            stages,
            micro_batches: count,
            rank_of_stage: snake_placement(ranks, virtual_stages_per_rank),
            ready,
            done: vec![0; 2 * stages],
            free: vec![0; ranks as usize],
            action_lists: (0..ranks)
                .map(|_| Vec::with_capacity(2 * (virtual_stages_per_rank * micro_batches) as usize))
                .collect(),
            queue: (0..ranks as usize).map(|rank| Reverse((0, rank))).collect(),
        }
    }

    fn run(&mut self) {
        while let Some(Reverse((now, rank))) = self.queue.pop() {
            // A busy rank has another event for the time at which it becomes idle.
            if self.free[rank] <= now
                && let Some(pass) = self.deepest_ready(rank, now)
            {
                self.carry_out(rank, pass, now);
            }
        }
    }

    fn stage_of(&self, pass: usize) -> usize {
        if pass < self.stages { pass } else { 2 * self.stages - 1 - pass }
    }

    fn deepest_ready(&self, rank: usize, now: u64) -> Option<usize> {
        // On a zigzag, a rank holds two stages of every 2p: one on the path down and one on the path up.
        let of_rank = (0..self.stages / self.ranks).flat_map(|virtual_stage| {
            let place = if virtual_stage.is_multiple_of(2) { rank } else { self.ranks - 1 - rank };
            let stage = virtual_stage * self.ranks + place;
            [stage, 2 * self.stages - 1 - stage]
        });
        let under_way = self.done[0] - self.done[2 * self.stages - 1];
        // Only the first pass adds a micro-batch to the pipeline, so only it must respect the limit. The deepest pass
        // goes first, because it frees activations soonest.
        of_rank.filter(|&pass| self.is_ready(pass, now) && (pass > 0 || under_way < self.under_way)).max()
    }

    fn is_ready(&self, pass: usize, now: u64) -> bool {
        let next = self.done[pass];
        next < self.micro_batches && self.ready[pass * self.micro_batches + next] <= now
    }

    fn carry_out(&mut self, rank: usize, pass: usize, now: u64) {
        // Micro-batches go through each pass in order, so the number of completed ones is the next one.
        let micro_batch = self.done[pass];
        self.done[pass] += 1;
        let forward = pass < self.stages;
        let end = now + if forward { FORWARD } else { BACKWARD };
        let stage = u32::try_from(self.stage_of(pass)).expect("fewer than 2^32 stages");
        let number = u32::try_from(micro_batch).expect("fewer than 2^32 micro-batches");
        let action = if forward { Action::forward(stage, number) } else { Action::backward(stage, number) };
        self.action_lists[rank].push(action);
        self.free[rank] = end;
        self.queue.push(Reverse((end, rank)));
        if pass + 1 < 2 * self.stages {
            self.ready[(pass + 1) * self.micro_batches + micro_batch] = end;
            let receiver = self.rank_of_stage[self.stage_of(pass + 1)] as usize;
            self.queue.push(Reverse((end, receiver)));
        }
    }
}
