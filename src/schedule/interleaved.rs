//! Interleaved schedules: each rank holds several chunks, and micro-batches go round the ranks several times.
//!
//! All members follow one table: for each group of `g` micro-batches, for each chunk, each micro-batch of the group.
//! Forwards walk down the table, backwards walk down the same table with the chunks mirrored (`v - 1 - chunk`). They
//! differ in the length of the warm-up, in whether backwards are split, and in how far `W` lags behind `I`.

use super::{Action, Kind, Schedule, loop_placement};

/// `(chunk, micro-batch)` of the `k`-th forward of every rank; the last group may be smaller.
fn table(chunks: u32, group_size: u32, micro_batches: u32) -> Vec<(u32, u32)> {
    let mut table = Vec::with_capacity((chunks * micro_batches) as usize);
    for first in (0..micro_batches).step_by(group_size as usize) {
        let group = first..(first + group_size).min(micro_batches);
        for chunk in 0..chunks {
            table.extend(group.clone().map(|i| (chunk, i)));
        }
    }
    table
}

/// Which members of the group of interleaved schedules differ from each other, and how.
#[derive(Clone, Copy)]
enum Backward {
    /// Whole, after the forward.
    Whole,
    /// Whole, fused with the forward before it.
    Fused,
    /// Split; the `i`-th `W` follows the `i + lag`-th `I`.
    Split { lag: u32 },
}

fn order(rank: u32, ranks: u32, chunks: u32, table: &[(u32, u32)], warm_up: usize, backward: Backward) -> Vec<Action> {
    let warm_up = warm_up.min(table.len());
    let forward_at = |k: usize| (table[k].0 * ranks + rank, table[k].1);
    let backward_at = |k: usize| ((chunks - 1 - table[k].0) * ranks + rank, table[k].1);
    let mut order = Vec::with_capacity(3 * table.len());
    let mut next_weight = 0;
    let put_backward = |order: &mut Vec<Action>, next_weight: &mut usize, k: usize| {
        let (stage, i) = backward_at(k);
        let Backward::Split { lag } = backward else { return order.push(Action::backward(stage, i)) };
        order.push(Action::input_gradient(stage, i));
        if k >= lag as usize {
            let (stage, i) = backward_at(*next_weight);
            order.push(Action::weight_gradient(stage, i));
            *next_weight += 1;
        }
    };
    order.extend((0..warm_up).map(|k| Action::forward(forward_at(k).0, forward_at(k).1)));
    for k in warm_up..table.len() {
        if let Backward::Fused = backward {
            order.push(Action::overlapped(forward_at(k), backward_at(k - warm_up)));
        } else {
            order.push(Action::forward(forward_at(k).0, forward_at(k).1));
            put_backward(&mut order, &mut next_weight, k - warm_up);
        }
    }
    for k in table.len() - warm_up..table.len() {
        put_backward(&mut order, &mut next_weight, k);
    }
    if let Backward::Split { .. } = backward {
        order.extend(
            (next_weight..table.len()).map(|k| Action::new(Kind::WeightGradient, backward_at(k).0, backward_at(k).1)),
        );
    }
    order
}

/// Sizes of one member of the family.
#[derive(Clone, Copy)]
pub(super) struct Loop {
    pub(super) ranks: u32,
    pub(super) chunks: u32,
    pub(super) group_size: u32,
    pub(super) micro_batches: u32,
}

impl Loop {
    fn build(self, name: &str, warm_up: impl Fn(u32) -> u32, backward: impl Fn(u32) -> Backward) -> Schedule {
        let Self { ranks, chunks, group_size, micro_batches } = self;
        let table = table(chunks, group_size, micro_batches);
        let orders =
            (0..ranks).map(|rank| order(rank, ranks, chunks, &table, warm_up(rank) as usize, backward(rank))).collect();
        Schedule::of_one_chain(name, micro_batches, loop_placement(ranks, chunks), orders)
    }

    /// Interleaved 1F1B: `w = 2 (p - r - 1) + (v - 1) g`.
    pub(super) fn interleaved(self) -> Schedule {
        let warm_up = |rank| 2 * (self.ranks - rank - 1) + (self.chunks - 1) * self.group_size;
        self.build("interleaved", warm_up, |_| Backward::Whole)
    }

    /// Interleaved 1F1B with each forward of the steady state fused with a backward: one forward more in the warm-up,
    /// because a fused pair needs the micro-batch of its backward to be back already.
    pub(super) fn interleaved_overlap(self) -> Schedule {
        let warm_up = |rank| 2 * (self.ranks - rank - 1) + (self.chunks - 1) * self.group_size + 1;
        self.build("interleaved_overlap", warm_up, |_| Backward::Fused)
    }

    /// Interleaved zero bubble: `w = (p - r - 1) + (v - 1) g`, and `W` lags behind `I` by `r`. With one chunk this is
    /// ZB-H1.
    pub(super) fn zero_bubble(self, name: &str) -> Schedule {
        let warm_up = |rank| (self.ranks - rank - 1) + (self.chunks - 1) * self.group_size;
        self.build(name, warm_up, |rank| Backward::Split { lag: rank })
    }
}
