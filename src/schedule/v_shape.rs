//! Schedules on a V: rank `r` holds stages `r` and `2p - 1 - r`, so first and last stage share a rank.

use super::{Action, Kind, Schedule, snake_placement};

/// Appends actions of one rank of a V; chunk 0 goes down, chunk 1 up again.
struct Rank {
    stages: [u32; 2],
    micro_batches: u32,
    order: Vec<Action>,
    /// Next micro-batch of each chunk, for `F`, `I` and `W`.
    next: [[u32; 2]; 3],
}

impl Rank {
    fn new(rank: u32, ranks: u32, micro_batches: u32) -> Self {
        Self {
            stages: [rank, 2 * ranks - 1 - rank],
            micro_batches,
            order: Vec::with_capacity(6 * micro_batches as usize),
            next: [[0; 2]; 3],
        }
    }

    /// One more of `kind`; micro-batches beyond the last are counted but left out.
    fn put(&mut self, kind: Kind, chunk: usize) {
        let row = match kind {
            Kind::Forward => 0,
            Kind::InputGradient => 1,
            _ => 2,
        };
        let next = &mut self.next[row][chunk];
        if *next < self.micro_batches {
            self.order.push(Action::new(kind, self.stages[chunk], *next));
        }
        *next += 1;
    }

    fn input_and_weight(&mut self, chunk: usize) {
        self.put(Kind::InputGradient, chunk);
        self.put(Kind::WeightGradient, chunk);
    }
}

/// ZB-V: as PyTorch runs it, planned for at least `2p - 1` micro-batches and cut down to `M`.
pub(super) fn zb_v(ranks: u32, micro_batches: u32) -> Schedule {
    let planned = micro_batches.max(2 * ranks - 1);
    let order = |rank: u32| {
        let mut to = Rank::new(rank, ranks, micro_batches);
        for _ in 0..2 * (ranks - rank) - 1 {
            to.put(Kind::Forward, 0);
        }
        for _ in 0..rank {
            to.put(Kind::Forward, 1);
            to.put(Kind::Forward, 0);
        }
        for _ in 0..ranks - rank {
            to.put(Kind::Forward, 1);
            to.input_and_weight(1);
        }
        while to.next[0][1] < to.next[0][0] || to.next[0][0] < planned {
            if to.next[0][0] < planned {
                to.put(Kind::Forward, 0);
            }
            to.input_and_weight(0);
            to.put(Kind::Forward, 1);
            to.input_and_weight(1);
        }
        for _ in 0..rank {
            to.put(Kind::InputGradient, 0);
            to.put(Kind::InputGradient, 1);
        }
        for _ in 0..ranks - rank {
            to.input_and_weight(0);
        }
        while to.next[2][1] < to.next[1][1] {
            to.put(Kind::WeightGradient, 1);
        }
        while to.next[2][0] < to.next[1][0] {
            to.put(Kind::WeightGradient, 0);
        }
        to.order
    };
    let orders = (0..ranks).map(order).collect();
    Schedule::of_one_chain("zb_v", micro_batches, snake_placement(ranks, 2), orders)
}
