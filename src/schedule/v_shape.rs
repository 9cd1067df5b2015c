//! V-shaped schedules: rank `r` holds stages `r` and `2p - 1 - r`, so one rank holds the first and the last stage.

use super::squeeze::squeeze;
use super::weights::refill;
use super::{Action, Durations, Kind, Schedule, snake_placement};
use crate::control::Control;
use crate::error::Result;

/// Builder of the action list of one rank. Virtual stage 0 runs down the ranks, virtual stage 1 up again.
struct Rank {
    stages: [u32; 2],
    micro_batches: u32,
    order: Vec<Action>,
    /// Next micro-batch of each virtual stage, for `F`, `I` and `W`.
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

    /// Adds the next action of `kind` for a virtual stage. Micro-batches beyond the last are counted, but not added.
    fn put(&mut self, kind: Kind, virtual_stage: usize) {
        let row = match kind {
            Kind::Forward => 0,
            Kind::InputGradient => 1,
            _ => 2,
        };
        let next = &mut self.next[row][virtual_stage];
        if *next < self.micro_batches {
            self.order.push(Action::new(kind, self.stages[virtual_stage], *next));
        }
        *next += 1;
    }

    fn input_and_weight(&mut self, virtual_stage: usize) {
        self.put(Kind::InputGradient, virtual_stage);
        self.put(Kind::WeightGradient, virtual_stage);
    }
}

/// Builds ZB-V in PyTorch's order, constructed for at least `2p - 1` micro-batches and then reduced to `M`.
pub(super) fn zb_v(ranks: u32, micro_batches: u32) -> Schedule {
    // The warm-up below always counts 2p - 1 forwards. With fewer micro-batches, the same loops run, and `put` leaves
    // out the passes that do not exist.
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
        // Steady state: one forward and one split backward of each virtual stage, until both have run all forwards.
        while to.next[0][1] < to.next[0][0] || to.next[0][0] < planned {
            if to.next[0][0] < planned {
                to.put(Kind::Forward, 0);
            }
            to.input_and_weight(0);
            to.put(Kind::Forward, 1);
            to.input_and_weight(1);
        }
        for _ in 0..rank {
            // Other ranks wait for input gradients, so the drain defers the weight gradients to its end.
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
    let action_lists = (0..ranks).map(order).collect();
    Schedule::of_one_chain("zb_v", micro_batches, snake_placement(ranks, 2), action_lists)
}

/// A function that returns the start slots of the four passes of micro-batch 0 on rank `r`: `F0`, `F1`, `I1`, `I0`.
/// Micro-batch `m` starts `6 m` slots later. The two `W` fill the slots between.
type Block = fn(ranks: u32, rank: u32) -> [u32; 4];

/// Builds V-Min, which needs a third of the activations of 1F1B.
pub(super) fn v_min(ranks: u32, micro_batches: u32, durations: &Durations, control: &Control) -> Result<Schedule> {
    let block: Block = |p, r| {
        // Blocks repeat every 6 slots. If 3 divides p, then 2 p is a multiple of 6, and F0 and I1 of a rank would
        // collide.
        let gap = if p.is_multiple_of(3) { 2 } else { 0 };
        [r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r]
    };
    of_blocks("v_min", ranks, micro_batches, block, 2 * ((ranks + 4) / 3), durations, control)
}

/// Builds V-Half, which needs half of the activations of 1F1B.
pub(super) fn v_half(ranks: u32, micro_batches: u32, durations: &Durations, control: &Control) -> Result<Schedule> {
    let block: Block = |p, r| {
        // If p is even, then 3 p is a multiple of 6, and F1 and I0 of a rank would collide.
        let gap = if p.is_multiple_of(2) { 3 } else { 0 };
        [2 * r, 3 * p - 2 - r, 3 * p + gap + 2 * r - 1, 6 * p + gap - 2 - r]
    };
    of_blocks("v_half", ranks, micro_batches, block, 2 * (ranks / 2 + 1), durations, control)
}

fn of_blocks(
    name: &str,
    ranks: u32,
    micro_batches: u32,
    block: Block,
    activation_limit: u32,
    durations: &Durations,
    control: &Control,
) -> Result<Schedule> {
    let action_lists =
        (0..ranks).map(|rank| repeat(block(ranks, rank), [rank, 2 * ranks - 1 - rank], micro_batches)).collect();
    // The blocks assume that all passes take equally long. Squeezing adapts the order to the real durations, and
    // removes the gaps in warm-up and drain.
    let repeated = Schedule::of_one_chain(name, micro_batches, snake_placement(ranks, 2), action_lists);
    squeeze(&repeated, activation_limit, durations, control)
}

/// Returns the repeated blocks of one rank, one block every six slots. Each `W` takes the first free slot after its
/// `I`.
fn repeat(block: [u32; 4], stages: [u32; 2], micro_batches: u32) -> Vec<Action> {
    const PASSES: [(Kind, usize); 4] =
        [(Kind::Forward, 0), (Kind::Forward, 1), (Kind::InputGradient, 1), (Kind::InputGradient, 0)];
    let mut slots = vec![None; (block[3] + 6 * micro_batches) as usize];
    for (start, (kind, virtual_stage)) in block.into_iter().zip(PASSES) {
        for i in 0..micro_batches {
            slots[(start + 6 * i) as usize] = Some(Action::new(kind, stages[virtual_stage], i));
        }
    }
    let mut order = Vec::with_capacity(6 * micro_batches as usize);
    let mut due = std::collections::VecDeque::new();
    for slot in slots {
        match slot {
            Some(action) => {
                order.push(action);
                if action.kind == Kind::InputGradient {
                    due.push_back(Action::weight_gradient(action.stage, action.micro_batch));
                }
            }
            None => order.extend(due.pop_front()),
        }
    }
    // The slots end with the last input gradient. The weight gradients that found no free slot follow.
    order.extend(due);
    order
}

/// Builds ZB-V for given durations: the usual order of forwards and input gradients, with each weight gradient moved to
/// a gap that is long enough.
pub(super) fn zb_v_fitted(
    ranks: u32,
    micro_batches: u32,
    durations: &Durations,
    control: &Control,
) -> Result<Schedule> {
    refill(&zb_v(ranks, micro_batches), 2 * ranks, durations, control)
}
