//! Removal of idle gaps from a schedule: a rank that would wait runs a later action of its list that is ready.
//!
//! The algorithm runs the action lists in virtual time. Each idle rank takes its first action whose inputs are
//! available. A forward moves only past actions that leave it an activation under the activation limit, so a valid
//! order never becomes a deadlock. An input gradient that is ready runs before a weight gradient, because other ranks
//! wait for it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Action, Durations, Kind, Schedule};
use crate::control::Control;
use crate::error::Result;

/// Number of pending actions that a rank examines for one that is ready. Bounds the time per decision. Not tuned.
const LOOK_AHEAD: usize = 64;

/// Times that differ by less count as equal, in seconds. Sums of the same durations in different order differ by
/// rounding errors.
const SAME_S: f64 = 1e-9;

/// Returns `schedule` with its idle gaps removed, under `activation_limit` activations per rank. `schedule` must have
/// one chain and split backwards.
pub(super) fn squeeze(
    schedule: &Schedule,
    activation_limit: u32,
    durations: &Durations,
    control: &Control,
) -> Result<Schedule> {
    // A forward that moves ahead too early uses memory that another micro-batch needs later. So first remove gaps
    // without moving forwards: on this tighter order, fewer forwards move ahead. Both orders are starting points,
    // because neither is always better.
    let in_turn = Waits { eager: false, patient: false };
    let (tight, _) = carried_out(schedule, activation_limit, durations, in_turn, control)?;
    let mut best: Option<(Schedule, f64)> = None;
    for from in [schedule, &tight] {
        for patient in [false, true] {
            let tried = carried_out(from, activation_limit, durations, Waits { eager: true, patient }, control)?;
            if best.as_ref().is_none_or(|best| tried.1 + SAME_S < best.1) {
                best = Some(tried);
            }
        }
    }
    // The first attempt always becomes the best, so there is one.
    Ok(best.expect("four were tried").0)
}

/// Policy of a rank whose next action is not ready.
#[derive(Debug, Clone, Copy)]
struct Waits {
    /// Whether forwards move ahead of actions that are not ready.
    eager: bool,
    /// Whether the rank idles if an input gradient will be ready before a weight gradient could end.
    patient: bool,
}

/// Runs `schedule` in virtual time under one policy. Returns the resulting order and its makespan in seconds.
fn carried_out(
    schedule: &Schedule,
    activation_limit: u32,
    durations: &Durations,
    waits: Waits,
    control: &Control,
) -> Result<(Schedule, f64)> {
    let mut run = Run::new(schedule, activation_limit, durations, waits);
    run.run(control)?;
    let makespan_s = run.ranks.iter().map(|rank| rank.free_s).fold(0.0, f64::max);
    let action_lists = run.ranks.into_iter().map(|rank| rank.order).collect();
    Ok((Schedule { action_lists, ..schedule.clone() }, makespan_s))
}

struct Rank {
    order: Vec<Action>,
    /// Pending actions in order. `None` marks actions that have run.
    todo: Vec<Option<Action>>,
    first: usize,
    held: u32,
    free_s: f64,
}

struct Run<'a> {
    durations: &'a Durations,
    rank_of_stage: &'a [u32],
    activation_limit: u32,
    waits: Waits,
    /// Time at which the input of each forward and each input gradient is available, by `[stage][micro-batch]`.
    forward_ready_s: Vec<f64>,
    input_ready_s: Vec<f64>,
    micro_batches: usize,
    /// Number of input gradients that each stage has run. They run in the order of the micro-batches.
    inputs_done: Vec<u32>,
    ranks: Vec<Rank>,
    /// Events, earliest first: a rank, and a time at which it may have an action to run.
    queue: BinaryHeap<Reverse<(Instant, usize)>>,
}

/// A time in seconds, at least 0, with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Instant(pub(super) f64);

impl Eq for Instant {}

impl PartialOrd for Instant {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Instant {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, activation_limit: u32, durations: &'a Durations, waits: Waits) -> Self {
        let micro_batches = schedule.total_micro_batches() as usize;
        let cells = micro_batches * schedule.rank_of_stage.len();
        let mut forward_ready_s = vec![f64::INFINITY; cells];
        // The inputs of stage 0 are the training data, which is available from the start.
        forward_ready_s[..micro_batches].fill(0.0);
        let ranks = schedule.action_lists.iter().map(|order| Rank {
            order: Vec::with_capacity(order.len()),
            todo: order.iter().copied().map(Some).collect(),
            first: 0,
            held: 0,
            free_s: 0.0,
        });
        Self {
            durations,
            rank_of_stage: &schedule.rank_of_stage,
            activation_limit,
            waits,
            forward_ready_s,
            input_ready_s: vec![f64::INFINITY; cells],
            micro_batches,
            inputs_done: vec![0; schedule.rank_of_stage.len()],
            ranks: ranks.collect(),
            queue: (0..schedule.action_lists.len()).map(|rank| Reverse((Instant(0.0), rank))).collect(),
        }
    }

    fn cell(&self, action: Action) -> usize {
        action.stage as usize * self.micro_batches + action.micro_batch as usize
    }

    fn run(&mut self, control: &Control) -> Result<()> {
        let mut events = 0_u32;
        while let Some(Reverse((Instant(now_s), rank))) = self.queue.pop() {
            events = events.wrapping_add(1);
            if events.is_multiple_of(4096) {
                control.check()?;
            }
            // A busy rank has another event for the time at which it becomes idle.
            if self.ranks[rank].free_s <= now_s + SAME_S
                && let Some(place) = self.choose(rank, now_s)
            {
                self.carry_out(rank, place, now_s);
            }
        }
        Ok(())
    }

    /// Returns the index in `todo` of the action that the rank runs now, or `None` if it waits.
    fn choose(&self, rank: usize, now_s: f64) -> Option<usize> {
        let Rank { todo, first, held, .. } = &self.ranks[rank];
        // Activations that the rank would hold if it ran the examined actions in order. A forward that moves ahead adds
        // one to all of them, so it may move only while this maximum is below the limit.
        let (mut held, mut max_held) = (*held, *held);
        let mut weight = None;
        let mut soonest_s = f64::INFINITY;
        let waiting =
            todo[*first..].iter().enumerate().filter_map(|(at, action)| action.map(|action| (*first + at, action)));
        for (turn, (place, action)) in waiting.take(LOOK_AHEAD).enumerate() {
            match action.kind {
                Kind::Forward => {
                    let ready = self.forward_ready_s[self.cell(action)] <= now_s + SAME_S;
                    // A forward is not taken past a weight gradient that is ready: the weight gradient frees memory and
                    // fills the gap as well.
                    if ready
                        && weight.is_none()
                        && (turn == 0 || (self.waits.eager && max_held < self.activation_limit))
                    {
                        return Some(place);
                    }
                    held += 1;
                    max_held = max_held.max(held);
                }
                Kind::WeightGradient => {
                    // Remember only the first weight gradient. It runs if no input gradient further down the list is
                    // ready.
                    if weight.is_none() && action.micro_batch < self.inputs_done[action.stage as usize] {
                        weight = Some(place);
                    }
                    held = held.saturating_sub(1);
                }
                _ => {
                    let ready_s = self.input_ready_s[self.cell(action)];
                    if ready_s <= now_s + SAME_S {
                        return Some(place);
                    }
                    soonest_s = soonest_s.min(ready_s);
                }
            }
        }
        let place = weight?;
        let weight_s = self.durations.weight_gradient_s[todo[place]?.stage as usize];
        (!self.waits.patient || now_s + weight_s <= soonest_s + SAME_S).then_some(place)
    }

    fn carry_out(&mut self, rank: usize, place: usize, now_s: f64) {
        let state = &mut self.ranks[rank];
        let Some(action) = state.todo[place].take() else { return };
        // Skip the finished actions at the front, so that the look-ahead always counts pending ones.
        while state.todo.get(state.first).is_some_and(Option::is_none) {
            state.first += 1;
        }
        state.order.push(action);
        let stage = action.stage as usize;
        let length_s = match action.kind {
            Kind::Forward => self.durations.forward_s[stage],
            Kind::WeightGradient => self.durations.weight_gradient_s[stage],
            _ => self.durations.input_gradient_s[stage],
        };
        let end_s = now_s + length_s;
        state.free_s = end_s;
        self.queue.push(Reverse((Instant(end_s), rank)));
        let cell = self.cell(action);
        let last = self.rank_of_stage.len() - 1;
        match action.kind {
            Kind::Forward => {
                self.ranks[rank].held += 1;
                if stage == last {
                    self.input_ready_s[cell] = end_s;
                } else {
                    let ready_s = self.deliver(rank, stage + 1, end_s);
                    self.forward_ready_s[cell + self.micro_batches] = ready_s;
                }
            }
            Kind::WeightGradient => self.ranks[rank].held -= 1,
            _ => {
                self.inputs_done[stage] += 1;
                if stage > 0 {
                    let ready_s = self.deliver(rank, stage - 1, end_s);
                    self.input_ready_s[cell - self.micro_batches] = ready_s;
                }
            }
        }
    }

    /// Returns the time at which `stage` has the output that `rank` finishes at `end_s`, and wakes up its rank then.
    fn deliver(&mut self, rank: usize, stage: usize, end_s: f64) -> f64 {
        let receiver = self.rank_of_stage[stage] as usize;
        let ready_s = if receiver == rank { end_s } else { end_s + self.durations.transfer_s };
        self.queue.push(Reverse((Instant(ready_s), receiver)));
        ready_s
    }
}
