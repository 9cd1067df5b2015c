//! Which sends and receives stand between the actions of a rank.
//!
//! Schedules order computation only. A backend with one in-order stream also needs the order of its messages; it is
//! built here as `torch.distributed.pipelining` builds it, and written in its words: `0F0 0SEND_F0 2RECV_F0 …`.

use std::fmt;

use super::{Costs, Inputs, Transfer};
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, Schedule};

/// One entry of a rank's list with communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Computes.
    Compute(Action),
    /// Sends the output of one of the rank's stages.
    Send(Message),
    /// Receives the input of one of the rank's stages.
    Receive(Message),
}

/// One tensor between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Which input it becomes, by [`Inputs`].
    pub input: usize,
    /// Gradient of an activation rather than an activation.
    pub is_gradient: bool,
    /// Stage that sends.
    pub from_stage: u32,
    /// Stage that receives.
    pub to_stage: u32,
    /// Micro-batch it belongs to.
    pub micro_batch: u32,
}

/// As PyTorch writes it: `0SEND_F3`, `1RECV_F3`, `1SEND_B3`.
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
    /// What the end of an action (not an overlapped pair) sends to another rank.
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
        (from_rank != schedule.rank_of_stage[stage]).then_some(message)
    }

    /// What it costs.
    #[must_use]
    pub fn cost(self, costs: &Costs) -> Transfer {
        if self.is_gradient {
            costs.gradient[self.to_stage as usize]
        } else {
            costs.activation[self.from_stage as usize]
        }
    }

    /// Rank that sends and rank that receives.
    #[must_use]
    pub fn ranks(self, schedule: &Schedule) -> (usize, usize) {
        let rank = |stage: u32| schedule.rank_of_stage[stage as usize] as usize;
        (rank(self.from_stage), rank(self.to_stage))
    }
}

/// PyTorch reduces the gradients of a stage and frees its weights behind its last backward, one turn each.
const TURNS_BEHIND_A_STAGE: u32 = 2;

/// Every rank's list of actions, sends and receives.
///
/// Ranks take turns, one action each (and two where PyTorch reduces and frees a stage's gradients), so that all of them see messages in one global order and no two streams block
/// each other. A send follows its action. Its receive is posted at the same moment, or, if deferred, right before the
/// action that needs it; then the lower rank of the two posts what it has deferred before it sends to the other.
///
/// # Errors
/// [`Error::Schedule`] if the orders wait for each other.
pub fn with_communication(schedule: &Schedule, deferred_receives: bool) -> Result<Vec<Vec<Operation>>> {
    let inputs = Inputs::of(schedule);
    let mut known = vec![false; inputs.count()];
    for (chain, ids) in schedule.micro_batches.iter().enumerate() {
        for id in ids.clone() {
            let first = Action::forward(u32::try_from(chain).unwrap_or(0) * schedule.chain_length, id);
            inputs.of_action(first).for_each(|input| known[input] = true);
        }
    }
    let mut lists: Vec<Vec<Operation>> = vec![Vec::new(); schedule.orders.len()];
    let mut next = vec![0; schedule.orders.len()];
    let mut pauses = vec![0_u32; schedule.orders.len()];
    let mut backwards_left = vec![0_u32; schedule.rank_of_stage.len()];
    for half in schedule.orders.iter().flatten().flat_map(|action| action.halves()) {
        backwards_left[half.stage as usize] += u32::from(half.kind != Kind::Forward);
    }
    let mut left = schedule.action_count();
    while left > 0 {
        let mut is_stuck = true;
        for (rank, order) in schedule.orders.iter().enumerate() {
            let Some(&action) = order.get(next[rank]) else { continue };
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
                format!("the orders of `{}` wait for each other", schedule.name),
                "validate the schedule to see the cycle of waiting actions",
            ));
        }
    }
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
                // Two ranks that each send first would wait for ever: the lower one receives first.
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
