//! Lock-step simulation: in each step, all ranks compute one action and send its output. The slowest rank ends the
//! step.
//!
//! A rank takes part in a step if the input of its next action was available when the step began. A step lasts until
//! all its actions have ended and all their messages have arrived. So links never queue, and no input arrives during a
//! step.

use super::communication::Message;
use super::measures::until_cancelled;
use super::{Costs, Inputs, Times, Transfer};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, Schedule};

/// Simulates `iterations` steps of training or inference. Each starts at the end of the last optimizer step before it.
///
/// # Errors
/// [`Error::Argument`] if `costs` doesn't match the schedule or `iterations` is 0, [`Error::Schedule`] if actions wait
/// for each other forever.
pub(super) fn times(schedule: &Schedule, costs: &Costs, iterations: u32) -> Result<Times> {
    costs.check(schedule)?;
    if iterations == 0 {
        return Err(Error::argument("`iterations` is 0", "set it to 1 or more"));
    }
    let inputs = Inputs::of(schedule);
    let stages = schedule.rank_of_stage.len();
    let rounds = iterations as usize;
    let mut offsets = vec![0];
    offsets.extend(schedule.action_lists.iter().scan(0, |sum, order| {
        *sum += order.len() * rounds;
        Some(*sum)
    }));
    let actions = schedule.action_count() * rounds;
    let mut times = Times {
        iterations,
        offsets,
        start_s: vec![0.0; actions],
        end_s: vec![0.0; actions],
        arrival_s: Vec::with_capacity(rounds * inputs.count()),
        last_backward_s: vec![f64::NEG_INFINITY; rounds * stages],
        step_s: 0.0,
    };
    for iteration in 0..rounds {
        run_iteration(schedule, costs, inputs, iteration, &mut times)?;
    }
    Ok(times)
}

fn run_iteration(
    schedule: &Schedule,
    costs: &Costs,
    inputs: Inputs,
    iteration: usize,
    times: &mut Times,
) -> Result<()> {
    let stages = schedule.rank_of_stage.len();
    let mut arrival_s = vec![f64::INFINITY; inputs.count()];
    for (chain, ids) in (0..).zip(&schedule.micro_batches) {
        let first_stage = chain * schedule.stages_per_pipeline;
        for input in ids.clone().flat_map(|id| inputs.of_action(Action::forward(first_stage, id))) {
            arrival_s[input] = times.step_s;
        }
    }
    // Links need no queues here: a step ends only when all its messages have arrived.
    let mut next = vec![0; schedule.action_lists.len()];
    let mut left = schedule.action_count();
    let mut begin_s = times.step_s;
    while left > 0 {
        let mut over_s = begin_s;
        // Compare with the start of the step, not with the current time: an output of this step may only be used in the
        // next one.
        let is_ready = |action: Action| inputs.of_action(action).all(|input| arrival_s[input] <= begin_s);
        let running: Vec<(usize, Action)> = schedule
            .action_lists
            .iter()
            .enumerate()
            .filter_map(|(rank, order)| order.get(next[rank]).map(|&action| (rank, action)))
            .filter(|&(_, action)| is_ready(action))
            .collect();
        // All ranks wait, and no message is in flight between steps, so nothing can change any more.
        if running.is_empty() {
            return Err(Error::schedule(
                format!("the actions of `{}` wait for each other: no rank can take the next step", schedule.name),
                "validate the schedule to see the cycle of waiting actions",
            ));
        }
        left -= running.len();
        for (rank, action) in running {
            let end_s = begin_s + costs.duration_s(action);
            let place = times.offsets[rank] + iteration * schedule.action_lists[rank].len() + next[rank];
            (times.start_s[place], times.end_s[place]) = (begin_s, end_s);
            next[rank] += 1;
            over_s = over_s.max(end_s);
            for half in action.halves() {
                if half.kind != Kind::Forward {
                    times.last_backward_s[iteration * stages + half.stage as usize] = end_s;
                }
                let Some(input) = inputs.made_ready_by(half) else { continue };
                let cost =
                    // Stages on the same rank exchange no message, so their transfer takes no time.
                    Message::sent_by(half, schedule, inputs).map_or(Transfer::default(), |message| message.cost(costs));
                arrival_s[input] = end_s + cost.busy_s + cost.latency_s;
                over_s = over_s.max(arrival_s[input]);
            }
        }
        begin_s = over_s;
    }
    times.arrival_s.extend(arrival_s);
    let optimized_s = (0..stages).map(|stage| {
        times.synchronized_from_s(schedule, iteration, stage) + costs.gradient_sync_s[stage] + costs.optimizer_s[stage]
    });
    times.step_s = optimized_s.fold(begin_s, f64::max);
    Ok(())
}

/// Returns how much later each action could end without a longer step, in seconds. Ordered like [`Times`].
pub(super) fn slack_s(schedule: &Schedule, times: &Times, control: &Control) -> Result<Vec<f64>> {
    let inputs = Inputs::of(schedule);
    let mut begins_s = times.start_s.clone();
    begins_s.push(times.step_s);
    begins_s.sort_by(f64::total_cmp);
    // All ranks start a step together, so the distinct start times are the starts of the steps.
    begins_s.dedup();
    let mut slack_s = Vec::with_capacity(times.start_s.len());
    for (rank, order) in schedule.action_lists.iter().enumerate() {
        for place in until_cancelled(times.offsets[rank]..times.offsets[rank + 1], control) {
            let place = place?;
            let count = place - times.offsets[rank];
            let (base, action) = (count / order.len() * inputs.count(), order[count % order.len()]);
            let made = action.halves().filter_map(|half| inputs.made_ready_by(half));
            // An action has ended for others only when its output has arrived.
            let through_s = made.map(|input| times.arrival_s[base + input]).fold(times.end_s[place], f64::max);
            let step_ends_s = begins_s.get(begins_s.partition_point(|&begin_s| begin_s <= times.start_s[place]));
            slack_s.push((step_ends_s.copied().unwrap_or(times.step_s) - through_s).max(0.0));
        }
    }
    Ok(slack_s)
}
