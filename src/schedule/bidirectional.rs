//! Bidirectional schedules: `DualPipe` and Chimera, with two copies of the model, and `DualPipeV`, with one copy folded
//! into a V.
//!
//! In `DualPipe` and `DualPipeV`, micro-batches reach each rank from two directions: 0 from the nearer end of the
//! pipeline and 1 from the farther end. Let `d` be the distance from the nearer end, `E` the number of ranks up to the
//! meeting point, and `e = E - d - 1`. Each rank runs eight phases:
//!
//! 1. `F0` × 2e; 2. `F0 F1` × (d+1); 3. `I1 W F1` × e; 4. `F0‖B1, F1‖B0` as often as there are micro-batches left;
//! 5. `B1, F1‖B0` × e; 6. `B1 B0` × (d+1), the second half of them `I` only; 7. `W I0` × e; 8. `W` × (d+1).

use super::{Action, Kind, Schedule, Synchronization, snake_placement};
use std::collections::VecDeque;

/// Builder of the action list of one rank. Side 0 is the direction from the nearer end of the pipeline.
struct Rank {
    /// `(stage, first micro-batch)` of each side.
    sides: [(u32, u32); 2],
    next_forward: [u32; 2],
    next_backward: [u32; 2],
    /// Input gradients whose weight gradients have not run yet, oldest first.
    weights: VecDeque<(u32, u32)>,
    order: Vec<Action>,
}

impl Rank {
    fn take_forward(&mut self, side: usize) -> (u32, u32) {
        self.next_forward[side] += 1;
        (self.sides[side].0, self.sides[side].1 + self.next_forward[side] - 1)
    }

    fn take_backward(&mut self, side: usize) -> (u32, u32) {
        self.next_backward[side] += 1;
        (self.sides[side].0, self.sides[side].1 + self.next_backward[side] - 1)
    }

    fn forward(&mut self, side: usize) {
        let (stage, i) = self.take_forward(side);
        self.order.push(Action::forward(stage, i));
    }

    fn backward(&mut self, side: usize, input_only: bool) {
        let (stage, i) = self.take_backward(side);
        if input_only {
            self.weights.push_back((stage, i));
        }
        let kind = if input_only { Kind::InputGradient } else { Kind::Backward };
        self.order.push(Action::new(kind, stage, i));
    }

    fn weight(&mut self) {
        if let Some((stage, i)) = self.weights.pop_front() {
            self.order.push(Action::weight_gradient(stage, i));
        }
    }

    fn pair(&mut self, forward_side: usize, backward_side: usize) {
        let forward = self.take_forward(forward_side);
        let backward = self.take_backward(backward_side);
        self.order.push(Action::overlapped(forward, backward));
    }

    /// Returns the action list of a rank at `distance` from the nearer end, with `half` ranks up to the meeting point
    /// and `each_way` micro-batches in each direction.
    fn eight_phases(mut self, distance: u32, half: u32, each_way: u32) -> Vec<Action> {
        // The loops below are the eight phases of the module's list, one loop per phase.
        let (near, far) = (distance + 1, half - distance - 1);
        (0..2 * far).for_each(|_| self.forward(0));
        for _ in 0..near {
            self.forward(0);
            self.forward(1);
        }
        // The backward is split here so that the input gradient leaves for the next rank one weight gradient earlier.
        for _ in 0..far {
            self.backward(1, true);
            self.weight();
            self.forward(1);
        }
        for i in 0..each_way + near - 2 * half {
            if i == 0 && far == 0 {
                // At the meeting point, the first backward needs the output of the forward just before it. Fusing the
                // two would make the pair wait for itself.
                self.forward(0);
                self.backward(1, false);
            } else {
                self.pair(0, 1);
            }
            self.pair(1, 0);
        }
        for _ in 0..far {
            self.backward(1, false);
            self.pair(1, 0);
        }
        // The second half of these backwards defers its weight gradients, which fill the bubble of the drain below.
        for i in 0..near {
            self.backward(1, 2 * i >= near);
            self.backward(0, 2 * i + 1 >= near);
        }
        for _ in 0..far {
            self.weight();
            self.backward(0, true);
        }
        (0..near).for_each(|_| self.weight());
        self.order
    }
}

fn rank_of(sides: [(u32, u32); 2], micro_batches: u32) -> Rank {
    Rank {
        sides,
        next_forward: [0; 2],
        next_backward: [0; 2],
        weights: VecDeque::new(),
        order: Vec::with_capacity(3 * micro_batches as usize),
    }
}

/// Builds `DualPipe`. Needs even `ranks` and `micro_batches`, and `micro_batches >= 2 ranks`.
pub(super) fn dualpipe(ranks: u32, micro_batches: u32) -> Schedule {
    let each_way = micro_batches / 2;
    let order = |rank: u32| {
        let (down, up) = ((rank, 0), (2 * ranks - 1 - rank, each_way));
        // In the second half of the ranks, the chain that runs up the ranks enters at the nearer end.
        let sides = if rank < ranks / 2 { [down, up] } else { [up, down] };
        rank_of(sides, micro_batches).eight_phases(rank.min(ranks - 1 - rank), ranks / 2, each_way)
    };
    two_chains("dualpipe", ranks, micro_batches, (0..ranks).map(order).collect())
}

/// Builds `DualPipeV`. Needs `micro_batches >= 2 ranks`.
pub(super) fn dualpipe_v(ranks: u32, micro_batches: u32) -> Schedule {
    let order = |rank: u32| {
        // DualPipeV is one half of a DualPipe with 2p ranks: the far end is the same rank's second stage, and every
        // micro-batch passes in both directions.
        rank_of([(rank, 0), (2 * ranks - 1 - rank, 0)], 2 * micro_batches).eight_phases(rank, ranks, micro_batches)
    };
    let action_lists = (0..ranks).map(order).collect();
    Schedule::of_one_chain("dualpipe_v", micro_batches, snake_placement(ranks, 2), action_lists)
}

/// Builds Chimera with direct concatenation of units. Needs even `ranks`, and `micro_batches` a multiple of `ranks`.
///
/// A unit is `D = p` micro-batches, half of them in each direction, in slots of one forward or one backward. Each unit
/// starts `2 D` slots after the previous one and fills its empty slots.
pub(super) fn chimera(ranks: u32, micro_batches: u32) -> Schedule {
    let each_way = micro_batches / 2;
    let order = |rank: u32| {
        let (down, up) = (rank, 2 * ranks - 1 - rank);
        // Place each pass in its slot of the unit, then sort. This avoids a case for each phase of each unit: the slots
        // of overlapping units never collide.
        let mut slots = Vec::with_capacity(2 * micro_batches as usize);
        for i in 0..each_way {
            let (unit, j) = (i / (ranks / 2), i % (ranks / 2));
            let start = 2 * ranks * unit + 2 * j;
            slots.push((start + rank, Action::forward(down, i)));
            slots.push((start + ranks - 1 - rank, Action::forward(up, each_way + i)));
            slots.push((start + 2 * ranks - 1 - rank, Action::backward(down, i)));
            slots.push((start + ranks + rank, Action::backward(up, each_way + i)));
        }
        slots.sort_unstable_by_key(|&(slot, _)| slot);
        slots.into_iter().map(|(_, action)| action).collect()
    };
    two_chains("chimera", ranks, micro_batches, (0..ranks).map(order).collect())
}

/// Creates a schedule with two chains: chain 0 runs down the ranks with the first half of the micro-batches, chain 1
/// runs up the ranks with the second half.
fn two_chains(name: &str, ranks: u32, micro_batches: u32, action_lists: Vec<Vec<Action>>) -> Schedule {
    Schedule {
        name: name.to_owned(),
        stages_per_pipeline: ranks,
        micro_batches: vec![0..micro_batches / 2, micro_batches / 2..micro_batches],
        // The second chain's stages are on the ranks in reverse order, as in the second half of a V.
        rank_of_stage: snake_placement(ranks, 2),
        weight_versions: vec![1; action_lists.len()],
        action_lists,
        synchronization: Synchronization::Flush,
    }
}
