//! Two streams of micro-batches that meet: `DualPipe` and Chimera on two copies of the model, `DualPipeV` on one folded
//! into a V.
//!
//! In `DualPipe` and `DualPipeV` each rank sees two directions, 0 (from its own end) and 1 (from the far end), and runs
//! eight phases; with `d` the distance from the nearer end, `e = E - d - 1` and `E` the length of a direction's half:
//!
//! 1. `F0` × 2e; 2. `F0 F1` × (d+1); 3. `I1 W F1` × e; 4. `F0‖B1, F1‖B0` as often as there are micro-batches left;
//! 5. `B1, F1‖B0` × e; 6. `B1 B0` × (d+1), the second half of them `I` only; 7. `W I0` × e; 8. `W` × (d+1).

use super::{Action, Kind, Pace, Schedule, snake_placement};
use std::collections::VecDeque;

/// Appends actions of one rank; `side` 0 enters the pipeline nearer than side 1.
struct Rank {
    /// `(stage, first micro-batch)` of each side.
    sides: [(u32, u32); 2],
    next_forward: [u32; 2],
    next_backward: [u32; 2],
    /// Input gradients whose weight gradients are due, oldest first.
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

    /// The eight phases. `distance` from the nearer end, `half` ranks to the meeting point, `each_way` micro-batches.
    fn eight_phases(mut self, distance: u32, half: u32, each_way: u32) -> Vec<Action> {
        let (near, far) = (distance + 1, half - distance - 1);
        (0..2 * far).for_each(|_| self.forward(0));
        for _ in 0..near {
            self.forward(0);
            self.forward(1);
        }
        for _ in 0..far {
            self.backward(1, true);
            self.weight();
            self.forward(1);
        }
        for i in 0..each_way + near - 2 * half {
            if i == 0 && far == 0 {
                // At the meeting point the first backward follows directly from the forward before it.
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

/// `ranks` and `micro_batches` even, `micro_batches >= 2 ranks`.
pub(super) fn dualpipe(ranks: u32, micro_batches: u32) -> Schedule {
    let each_way = micro_batches / 2;
    let order = |rank: u32| {
        let (down, up) = ((rank, 0), (2 * ranks - 1 - rank, each_way));
        let sides = if rank < ranks / 2 { [down, up] } else { [up, down] };
        rank_of(sides, micro_batches).eight_phases(rank.min(ranks - 1 - rank), ranks / 2, each_way)
    };
    two_chains("dualpipe", ranks, micro_batches, (0..ranks).map(order).collect())
}

/// `micro_batches >= 2 ranks`.
pub(super) fn dualpipe_v(ranks: u32, micro_batches: u32) -> Schedule {
    let order = |rank: u32| {
        rank_of([(rank, 0), (2 * ranks - 1 - rank, 0)], 2 * micro_batches).eight_phases(rank, ranks, micro_batches)
    };
    let orders = (0..ranks).map(order).collect();
    Schedule::of_one_chain("dualpipe_v", micro_batches, snake_placement(ranks, 2), orders)
}

/// Units of `D = p` micro-batches, half of them each way, laid out in slots of one forward or backward; each next unit
/// starts `2 D` slots later and fills the holes of the one before. `ranks` even, `micro_batches` a multiple of it.
pub(super) fn chimera(ranks: u32, micro_batches: u32) -> Schedule {
    let each_way = micro_batches / 2;
    let order = |rank: u32| {
        let (down, up) = (rank, 2 * ranks - 1 - rank);
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

/// Chain 0 goes down the ranks with the first half of the micro-batches, chain 1 up with the second.
fn two_chains(name: &str, ranks: u32, micro_batches: u32, orders: Vec<Vec<Action>>) -> Schedule {
    Schedule {
        name: name.to_owned(),
        chain_length: ranks,
        micro_batches: vec![0..micro_batches / 2, micro_batches / 2..micro_batches],
        rank_of_stage: snake_placement(ranks, 2),
        weight_versions: vec![1; orders.len()],
        orders,
        pace: Pace::Flush,
    }
}
