//! The order of sends and receives between the actions of a rank.
//!
//! A [`Schedule`] orders computation only. A backend with one in-order stream also needs the order of its messages.
//! This module builds it as `torch.distributed.pipelining` does, in PyTorch's notation: `0F0 0SEND_F0 2RECV_F0 …`.

use std::fmt;

use super::{Costs, Inputs, Transfer};
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, Schedule};

/// One operation in a rank's list of computation and communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Computes one action of the schedule.
    Compute(Action),
    /// Sends the output of one of the rank's stages.
    Send(Message),
    /// Receives the input of one of the rank's stages.
    Receive(Message),
}

/// One tensor that is sent between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Index in [`Inputs`] of the input that the message provides.
    pub input: usize,
    /// Whether the tensor is a gradient of an activation, rather than an activation.
    pub is_gradient: bool,
    /// Stage that sends the tensor.
    pub from_stage: u32,
    /// Stage that receives the tensor.
    pub to_stage: u32,
    /// Micro-batch of the tensor.
    pub micro_batch: u32,
}

/// Formats the operation in PyTorch's notation: `0SEND_F3`, `1RECV_F3`, `1SEND_B3`.
impl fmt::Display for Operation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stage, verb, message) = match self {
            Self::Compute(action) => return action.fmt(out),
            Self::Send(message) => (message.from_stage, "SEND", message),
            Self::Receive(message) => (message.to_stage, "RECV", message),
        };
        write!(out, "{stage}{verb}_{}{}", if message.is_gradient { 'B' } else { 'F' }, message.micro_batch)
    }
}

impl Message {
    /// Returns the message that the end of an action sends to another rank, or `None`. The action must not be an
    /// overlapped pair.
    #[must_use]
    pub fn sent_by(action: Action, schedule: &Schedule, inputs: Inputs) -> Option<Self> {
        let input = inputs.made_ready_by(action)?;
        let (is_gradient, stage, micro_batch) = inputs.describe(input);
        let to_stage = u32::try_from(stage).ok()?;
        let from_rank = schedule.rank_of_stage[action.stage as usize];
        let message = Self {
            input,
            is_gradient,
            from_stage: action.stage,
            to_stage,
            micro_batch: u32::try_from(micro_batch).ok()?,
        };
        // Stages on the same rank pass tensors in memory.
        (from_rank != schedule.rank_of_stage[stage]).then_some(message)
    }

    /// Returns the time that the message takes.
    #[must_use]
    pub fn cost(self, costs: &Costs) -> Transfer {
        if self.is_gradient {
            // Both lists belong to the boundary behind a stage, so a gradient's cost is at the stage that receives it.
            costs.gradient[self.to_stage as usize]
        } else {
            costs.activation[self.from_stage as usize]
        }
    }

    /// Returns the rank that sends and the rank that receives.
    #[must_use]
    pub fn ranks(self, schedule: &Schedule) -> (usize, usize) {
        let rank = |stage: u32| schedule.rank_of_stage[stage as usize] as usize;
        (rank(self.from_stage), rank(self.to_stage))
    }
}

/// Turns that a rank pauses after a stage's last backward: PyTorch then reduces the stage's gradients and frees its
/// weights, with one turn for each.
const TURNS_BEHIND_A_STAGE: u32 = 2;

/// Returns every rank's list of actions, sends and receives.
///
/// Ranks take turns and run one action in each. After a stage's last backward they pause for two turns, as in PyTorch.
/// So all ranks see the messages in one global order, and no two streams block each other. A send follows its action.
/// Its receive is posted at the same time or, if deferred, right before the action that needs it. With deferred
/// receives, the lower rank of a pair posts its deferred receives from the other before it sends to it.
///
/// # Errors
/// [`Error::Schedule`] if the actions wait for each other.
pub fn with_communication(schedule: &Schedule, deferred_receives: bool) -> Result<Vec<Vec<Operation>>> {
    let inputs = Inputs::of(schedule);
    let mut known = vec![false; inputs.count()];
    // The first stage of each chain has its inputs from the start: they are training data.
    for (chain, ids) in schedule.micro_batches.iter().enumerate() {
        for id in ids.clone() {
            let first = Action::forward(u32::try_from(chain).unwrap_or(0) * schedule.stages_per_pipeline, id);
            inputs.of_action(first).for_each(|input| known[input] = true);
        }
    }
    let mut lists: Vec<Vec<Operation>> = vec![Vec::new(); schedule.action_lists.len()];
    let mut next = vec![0; schedule.action_lists.len()];
    let mut pauses = vec![0_u32; schedule.action_lists.len()];
    let mut backwards_left = vec![0_u32; schedule.rank_of_stage.len()];
    for half in schedule.action_lists.iter().flatten().flat_map(|action| action.halves()) {
        backwards_left[half.stage as usize] += u32::from(half.kind != Kind::Forward);
    }
    let mut left = schedule.action_count();
    while left > 0 {
        // One round over all ranks. If no rank moves or pauses in it, none ever will.
        let mut is_stuck = true;
        for (rank, order) in schedule.action_lists.iter().enumerate() {
            let Some(&action) = order.get(next[rank]) else { continue };
            // A pause counts as progress, or a round in which all ranks pause would look like a deadlock.
            if pauses[rank] > 0 {
                pauses[rank] -= 1;
                is_stuck = false;
                continue;
            }
            if !inputs.of_action(action).all(|input| known[input]) {
                continue;
            }
            is_stuck = false;
            next[rank] += 1;
            left -= 1;
            lists[rank].push(Operation::Compute(action));
            for half in action.halves() {
                if half.kind != Kind::Forward {
                    let backwards_left = &mut backwards_left[half.stage as usize];
                    *backwards_left -= 1;
                    pauses[rank] += if *backwards_left == 0 { TURNS_BEHIND_A_STAGE } else { 0 };
                }
                if let Some(input) = inputs.made_ready_by(half) {
                    known[input] = true;
                }
                if let Some(message) = Message::sent_by(half, schedule, inputs) {
                    lists[rank].push(Operation::Send(message));
                    lists[message.ranks(schedule).1].push(Operation::Receive(message));
                }
            }
        }
        if is_stuck {
            return Err(Error::schedule(
                format!("the actions of `{}` wait for each other", schedule.name),
                "validate the schedule to see the cycle of waiting actions",
            ));
        }
    }
    // Moving receives afterwards keeps the global order of sends, which prevents deadlocks, in one place.
    if deferred_receives {
        for (rank, list) in lists.iter_mut().enumerate() {
            *list = defer(list, rank, schedule, inputs);
        }
    }
    Ok(lists)
}

/// Moves each receive of one rank down to the action that needs it.
fn defer(list: &[Operation], rank: usize, schedule: &Schedule, inputs: Inputs) -> Vec<Operation> {
    let mut deferred: Vec<Message> = Vec::new();
    let mut moved = Vec::with_capacity(list.len());
    for &operation in list {
        match operation {
            Operation::Receive(message) => {
                deferred.push(message);
                continue;
            }
            Operation::Compute(action) => {
                for input in inputs.of_action(action) {
                    if let Some(place) = deferred.iter().position(|message| message.input == input) {
                        moved.push(Operation::Receive(deferred.remove(place)));
                    }
                }
            }
            Operation::Send(sent) => {
                // If both ranks of a pair sent first, each would wait forever for the other's receive. So the lower one
                // receives first.
                let peer = sent.ranks(schedule).1;
                if rank < peer {
                    deferred.retain(|message| {
                        let comes_from_peer = message.ranks(schedule).0 == peer;
                        if comes_from_peer {
                            moved.push(Operation::Receive(*message));
                        }
                        !comes_from_peer
                    });
                }
            }
        }
        moved.push(operation);
    }
    moved
}
