//! Interleaved schedules: each rank holds several virtual stages, and each micro-batch passes through all
//! ranks once per virtual stage.
//!
//! All of them follow one table. For each group of `g` micro-batches and each virtual stage, it lists each micro-batch
//! of the group. Forwards follow the table from top to bottom. Backwards follow the same table with mirrored virtual
//! stages (`v - 1 - virtual_stage`). The schedules differ in the depth of the warm-up, in whether backwards are split,
//! and in how far `W` lags behind `I`.

use super::{Action, Kind, Schedule, loop_placement};

/// Returns `(virtual_stage, micro-batch)` of the `k`-th forward of every rank. The last group may be smaller.
fn table(virtual_stages_per_rank: u32, group_size: u32, micro_batches: u32) -> Vec<(u32, u32)> {
    let mut table = Vec::with_capacity((virtual_stages_per_rank * micro_batches) as usize);
    for first in (0..micro_batches).step_by(group_size as usize) {
        let group = first..(first + group_size).min(micro_batches);
        for virtual_stage in 0..virtual_stages_per_rank {
            table.extend(group.clone().map(|i| (virtual_stage, i)));
        }
    }
    table
}

/// The backward passes of an interleaved schedule.
#[derive(Clone, Copy)]
enum Backward {
    /// Whole backwards. Each runs after a forward.
    Whole,
    /// Whole backwards. Each is fused with the forward before it.
    Fused,
    /// Split backwards. The `i`-th `W` follows the `i + lag`-th `I`.
    Split { lag: u32 },
}

fn order(
    rank: u32,
    ranks: u32,
    virtual_stages_per_rank: u32,
    table: &[(u32, u32)],
    warm_up: usize,
    backward: Backward,
) -> Vec<Action> {
    // With few micro-batches, the warm-up covers all forwards, and the steady state is empty.
    let warm_up = warm_up.min(table.len());
    let forward_at = |k: usize| (table[k].0 * ranks + rank, table[k].1);
    let backward_at = |k: usize| ((virtual_stages_per_rank - 1 - table[k].0) * ranks + rank, table[k].1);
    let mut order = Vec::with_capacity(3 * table.len());
    let mut next_weight = 0;
    let put_backward = |order: &mut Vec<Action>, next_weight: &mut usize, k: usize| {
        let (stage, i) = backward_at(k);
        // A weight gradient frees the oldest activation. A lag of r keeps the rank's peak at that of the first rank,
        // and leaves r weight gradients to fill the bubble of the drain.
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

/// Sizes of an interleaved schedule.
#[derive(Clone, Copy)]
pub(super) struct Loop {
    pub(super) ranks: u32,
    pub(super) virtual_stages_per_rank: u32,
    pub(super) group_size: u32,
    pub(super) micro_batches: u32,
}

impl Loop {
    fn build(self, name: &str, warm_up: impl Fn(u32) -> u32, backward: impl Fn(u32) -> Backward) -> Schedule {
        let Self { ranks, virtual_stages_per_rank, group_size, micro_batches } = self;
        let table = table(virtual_stages_per_rank, group_size, micro_batches);
        let action_lists = (0..ranks)
            .map(|rank| order(rank, ranks, virtual_stages_per_rank, &table, warm_up(rank) as usize, backward(rank)))
            .collect();
        Schedule::of_one_chain(name, micro_batches, loop_placement(ranks, virtual_stages_per_rank), action_lists)
    }

    /// Builds interleaved 1F1B with warm-up depth `w = 2 (p - r - 1) + (v - 1) g`.
    pub(super) fn interleaved(self) -> Schedule {
        // The first backward of a rank needs all earlier virtual stages of one group, and a round trip over the ranks
        // behind it.
        let warm_up = |rank| 2 * (self.ranks - rank - 1) + (self.virtual_stages_per_rank - 1) * self.group_size;
        self.build("interleaved", warm_up, |_| Backward::Whole)
    }

    /// Builds interleaved 1F1B whose steady state fuses each forward with a backward. The warm-up has one more forward,
    /// because the gradient for the backward of a pair must have arrived when the pair starts.
    pub(super) fn interleaved_overlap(self) -> Schedule {
        let warm_up = |rank| 2 * (self.ranks - rank - 1) + (self.virtual_stages_per_rank - 1) * self.group_size + 1;
        self.build("interleaved_overlap", warm_up, |_| Backward::Fused)
    }

    /// Builds interleaved zero bubble with warm-up depth `w = (p - r - 1) + (v - 1) g`. `W` lags behind `I` by `r`.
    /// With one virtual stage per rank, this is ZB-H1.
    pub(super) fn zero_bubble(self, name: &str) -> Schedule {
        // Half of the warm-up of interleaved 1F1B over the ranks behind, as in PyTorch's ScheduleInterleavedZeroBubble.
        // With one virtual stage per rank, this is the warm-up of ZB-H1, p - r - 1.
        let warm_up = |rank| (self.ranks - rank - 1) + (self.virtual_stages_per_rank - 1) * self.group_size;
        self.build(name, warm_up, |rank| Backward::Split { lag: rank })
    }
}
