//! Placement of weight gradients in idle gaps. The order of forwards and input gradients stays unchanged.
//!
//! No other action waits for a weight gradient, except for the memory that it frees. So each rank fills the gap before
//! its next forward or input gradient with pending weight gradients, oldest first. It runs one earlier only to stay
//! under the activation limit.

use super::{Action, Durations, Kind, Schedule};
use crate::control::Control;
use crate::error::Result;

/// Fractions of a weight gradient that may extend beyond its gap. Each is tried. Not tuned.
const OVERRUNS: [f64; 9] = [0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0];

/// Times that differ by less count as equal, in seconds. Sums of the same durations in different order differ by
/// rounding errors.
const SAME_S: f64 = 1e-9;

/// Returns `schedule` with its weight gradients moved for the shortest makespan. `schedule` must have one chain and
/// split backwards.
///
/// It must also be valid and hold at most `activation_limit` activations per rank.
pub(super) fn refill(
    schedule: &Schedule,
    activation_limit: u32,
    durations: &Durations,
    control: &Control,
) -> Result<Schedule> {
    // No single overrun is best: a small one leaves gaps, a large one delays the next pass. After the last forward, a
    // delay adds directly to the drain, so an overrun of 0 is tried there as well.
    let pairs = OVERRUNS.into_iter().flat_map(|early| [0.0, early].map(|late| (early, late)));
    let mut shortest: Option<Run> = None;
    for overruns in pairs {
        let mut run = Run::new(schedule, activation_limit, durations, overruns);
        run.run(control)?;
        if shortest.as_ref().is_none_or(|shortest| run.makespan_s() < shortest.makespan_s() + SAME_S) {
            shortest = Some(run);
        }
    }
    let action_lists = shortest
        .map_or_else(|| schedule.action_lists.clone(), |run| run.ranks.into_iter().map(|rank| rank.order).collect());
    Ok(Schedule { action_lists, ..schedule.clone() })
}

#[derive(Default)]
struct Rank {
    order: Vec<Action>,
    next: usize,
    /// Input gradients whose weight gradients haven't run, oldest first.
    due: std::collections::VecDeque<Action>,
    held: u32,
    forwards_left: usize,
    free_s: f64,
}

struct Run<'a> {
    schedule: &'a Schedule,
    durations: &'a Durations,
    activation_limit: u32,
    /// Fractions of a weight gradient that may extend beyond its gap, before and after the last forward of the rank.
    overruns: (f64, f64),
    /// Time at which the input of each forward and each input gradient is available, by `[stage][micro-batch]`.
    forward_ready_s: Vec<f64>,
    input_ready_s: Vec<f64>,
    micro_batches: usize,
    ranks: Vec<Rank>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, activation_limit: u32, durations: &'a Durations, overruns: (f64, f64)) -> Self {
        let micro_batches = schedule.total_micro_batches() as usize;
        let cells = micro_batches * schedule.rank_of_stage.len();
        let mut forward_ready_s = vec![f64::INFINITY; cells];
        // The inputs of stage 0 are the training data, which is available from the start.
        forward_ready_s[..micro_batches].fill(0.0);
        let rank = |order: &Vec<Action>| Rank {
            order: Vec::with_capacity(order.len()),
            forwards_left: order.iter().filter(|action| action.kind == Kind::Forward).count(),
            ..Rank::default()
        };
        Self {
            schedule,
            durations,
            activation_limit,
            overruns,
            forward_ready_s,
            input_ready_s: vec![f64::INFINITY; cells],
            micro_batches,
            ranks: schedule.action_lists.iter().map(rank).collect(),
        }
    }

    fn makespan_s(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.free_s).fold(0.0, f64::max)
    }

    fn run(&mut self, control: &Control) -> Result<()> {
        // Ranks that may continue. Each delivery adds its receiver again. The order of ranks does not matter: the start
        // of an action depends only on its rank's earlier actions and on its input.
        let mut awake: Vec<usize> = (0..self.ranks.len()).collect();
        let mut events = 0_u32;
        while let Some(rank) = awake.pop() {
            events = events.wrapping_add(1);
            if events.is_multiple_of(1024) {
                control.check()?;
            }
            while let Some(receiver) = self.step(rank) {
                if receiver != rank {
                    awake.push(receiver);
                }
            }
        }
        for rank in 0..self.ranks.len() {
            // All forwards and input gradients have run, so the remaining weight gradients follow without gaps.
            while self.put_weight(rank) {}
        }
        Ok(())
    }

    /// Runs the next forward or input gradient of `rank`. Returns the rank that receives its output, or `None` if
    /// `rank` must wait.
    fn step(&mut self, rank: usize) -> Option<usize> {
        let order = &self.schedule.action_lists[rank];
        // Ignore where the given order has its weight gradients. `put_weight` places them.
        while order.get(self.ranks[rank].next).is_some_and(|action| action.kind == Kind::WeightGradient) {
            self.ranks[rank].next += 1;
        }
        let action = *order.get(self.ranks[rank].next)?;
        let stage = action.stage as usize;
        let cell = stage * self.micro_batches + action.micro_batch as usize;
        let forward = action.kind == Kind::Forward;
        let ready_s = if forward { self.forward_ready_s[cell] } else { self.input_ready_s[cell] };
        if ready_s.is_infinite() {
            return None;
        }
        // One weight gradient is enough: it frees the one activation that the forward needs.
        if forward && self.ranks[rank].held >= self.activation_limit {
            self.put_weight(rank);
        }
        while self.has_gap_before(rank, ready_s) && self.put_weight(rank) {}
        let durations = self.durations;
        let length_s = if forward { durations.forward_s[stage] } else { durations.input_gradient_s[stage] };
        let state = &mut self.ranks[rank];
        state.next += 1;
        state.order.push(action);
        state.free_s = state.free_s.max(ready_s) + length_s;
        if forward {
            state.held += 1;
            state.forwards_left -= 1;
        } else {
            state.due.push_back(action);
        }
        Some(self.deliver(rank, action, cell))
    }

    fn has_gap_before(&self, rank: usize, ready_s: f64) -> bool {
        let Rank { free_s, due, forwards_left, .. } = &self.ranks[rank];
        let overrun = if *forwards_left > 0 { self.overruns.0 } else { self.overruns.1 };
        due.front().is_some_and(|first| {
            let weight_s = self.durations.weight_gradient_s[first.stage as usize];
            free_s + SAME_S < ready_s && free_s + weight_s <= ready_s + overrun * weight_s + SAME_S
        })
    }

    /// Records when the output of `action` reaches the next stage. Returns that stage's rank, or `rank` if no stage
    /// follows.
    fn deliver(&mut self, rank: usize, action: Action, cell: usize) -> usize {
        let (stage, last) = (action.stage as usize, self.schedule.rank_of_stage.len() - 1);
        let end_s = self.ranks[rank].free_s;
        let arrival_s = |to: usize| {
            let receiver = self.schedule.rank_of_stage[to] as usize;
            (receiver, if receiver == rank { end_s } else { end_s + self.durations.transfer_s })
        };
        match action.kind {
            // The last stage computes its gradient from its own output, without a transfer.
            Kind::Forward if stage == last => {
                self.input_ready_s[cell] = end_s;
                rank
            }
            Kind::Forward => {
                let (receiver, ready_s) = arrival_s(stage + 1);
                self.forward_ready_s[cell + self.micro_batches] = ready_s;
                receiver
            }
            _ if stage == 0 => rank,
            _ => {
                let (receiver, ready_s) = arrival_s(stage - 1);
                self.input_ready_s[cell - self.micro_batches] = ready_s;
                receiver
            }
        }
    }

    /// Runs the oldest pending weight gradient. Returns whether there was one.
    fn put_weight(&mut self, rank: usize) -> bool {
        let state = &mut self.ranks[rank];
        let Some(first) = state.due.pop_front() else { return false };
        state.order.push(Action::weight_gradient(first.stage, first.micro_batch));
        state.held -= 1;
        state.free_s += self.durations.weight_gradient_s[first.stage as usize];
        true
    }
}
