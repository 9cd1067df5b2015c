//! Simulation of a schedule with a heap of events: the event that occurs next decides what starts.
//!
//! It is slower than [`super::fast_simulation`] and independent of it, so each checks the other. It also covers ranks
//! that wait for their messages: one in-order stream per rank, and blocking sends and receives. Several steps can
//! follow each other.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rustc_hash::FxHashMap;

use super::communication::{Message, Operation, with_communication};
use super::{Communication, Costs, Inputs, Times, Transfer};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, Schedule};

/// Simulates `iterations` steps. A rank starts the next step when the optimizer steps of all its stages have ended.
///
/// # Errors
/// [`Error::Argument`] if `costs` doesn't match the schedule or `iterations` is 0, [`Error::Schedule`] if actions or
/// messages deadlock, and [`Error::Cancelled`] if `control` is cancelled.
pub fn times(
    schedule: &Schedule,
    costs: &Costs,
    communication: Communication,
    iterations: u32,
    control: &Control,
) -> Result<Times> {
    costs.check(schedule)?;
    if iterations == 0 {
        return Err(Error::argument("`iterations` is 0", "set it to 1 or more"));
    }
    let mut simulation = EventSimulation::new(schedule, costs, communication, iterations as usize)?;
    simulation.run(control)?;
    simulation.finish()
}

/// Arrival time of an input that has not arrived.
const ABSENT: f64 = f64::INFINITY;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The running action of a rank ends.
    Computed { rank: usize },
    /// The communication stream of a rank has sent its first message.
    Sent { rank: usize },
    /// A link can transfer its next message.
    LinkFree { link: usize },
    /// A message of an iteration arrives at its receiver.
    Arrived { iteration: usize, message: usize },
    /// The optimizer step of one stage of a rank ends.
    Optimized { iteration: usize, rank: usize },
}

/// Progress of a rank. Actions are counted over all iterations.
#[derive(Debug, Clone, Default)]
struct Lane {
    started: usize,
    ended: usize,
    /// Sends and receives of the current blocking group that have not completed.
    in_group: usize,
    /// Index of the next entry of the communication stream, over all iterations.
    next_message: usize,
    /// Whether the stream is busy sending that entry.
    is_streaming: bool,
}

#[derive(Debug, Default)]
struct LinkQueue {
    is_busy: bool,
    waiting: VecDeque<(usize, usize)>,
}

/// One entry of a communication stream: a send or a receive.
#[derive(Debug, Clone, Copy)]
struct StreamEntry {
    message: usize,
    is_send: bool,
    /// Number of actions of the iteration that must end before the entry is issued.
    behind: usize,
}

struct EventSimulation<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    communication: Communication,
    iterations: usize,
    inputs: Inputs,
    now_s: f64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events_pushed: u64,
    lanes: Vec<Lane>,
    /// All messages of an iteration.
    messages: Vec<Message>,
    /// Index of the message that makes an input available. Inputs that stay on their rank have none.
    message_of_input: FxHashMap<usize, usize>,
    link_of_ranks: FxHashMap<(usize, usize), usize>,
    links: Vec<LinkQueue>,
    streams: Vec<Vec<StreamEntry>>,
    /// Number of sides (0 to 2) that have posted a blocking message, by `[iteration][message]`.
    sides: Vec<u8>,
    /// Whether an input has been received, by `[iteration][input]`.
    is_ready: Vec<bool>,
    /// Backwards that have not ended, over all chains, by `[iteration][stage of the chain]`.
    backwards_left: Vec<usize>,
    /// Stages whose optimizer step hasn't ended, by `[iteration][rank]`.
    optimizers_left: Vec<usize>,
    times: Times,
}

impl<'a> EventSimulation<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs, communication: Communication, iterations: usize) -> Result<Self> {
        let inputs = Inputs::of(schedule);
        let chain = schedule.stages_per_pipeline as usize;
        let stages = schedule.rank_of_stage.len();
        let ranks = schedule.action_lists.len();

        let mut messages = Vec::new();
        let mut backwards = vec![0; chain];
        for half in schedule.action_lists.iter().flatten().flat_map(|action| action.halves()) {
            messages.extend(Message::sent_by(half, schedule, inputs));
            if half.kind != Kind::Forward {
                backwards[half.stage as usize % chain] += 1;
            }
        }
        // Messages get consecutive numbers, so that the state of each is an entry of a vector and not of a map.
        let message_of_input: FxHashMap<usize, usize> =
            messages.iter().enumerate().map(|(number, message)| (message.input, number)).collect();
        let mut link_of_ranks = FxHashMap::default();
        for message in &messages {
            // Virtual stages on the same pair of ranks share one link, so their messages queue behind each other.
            let next = link_of_ranks.len();
            link_of_ranks.entry(message.ranks(schedule)).or_insert(next);
        }
        let streams = match communication {
            Communication::Stream { deferred_receives } => with_communication(schedule, deferred_receives)?
                .iter()
                .map(|list| stream_of(list, &message_of_input))
                .collect(),
            _ => Vec::new(),
        };

        let mut optimizers = vec![0; ranks];
        for (stage, &rank) in schedule.rank_of_stage.iter().enumerate() {
            // Inference has no backwards and so no optimizer step to wait for.
            optimizers[rank as usize] += usize::from(backwards[stage % chain] > 0);
        }
        let mut arrival_s = vec![ABSENT; inputs.count()];
        for (index, ids) in schedule.micro_batches.iter().enumerate() {
            let first_stage = u32::try_from(index).unwrap_or(0) * schedule.stages_per_pipeline;
            for input in ids.clone().flat_map(|id| inputs.of_action(Action::forward(first_stage, id))) {
                // The first stage of each chain reads training data, which is available from the start.
                arrival_s[input] = 0.0;
            }
        }
        let arrival_s = arrival_s.repeat(iterations);
        let mut offsets = vec![0];
        offsets.extend(schedule.action_lists.iter().scan(0, |sum, order| {
            *sum += order.len() * iterations;
            Some(*sum)
        }));
        let actions = schedule.action_count() * iterations;
        Ok(Self {
            schedule,
            costs,
            communication,
            iterations,
            inputs,
            now_s: 0.0,
            events: BinaryHeap::new(),
            events_pushed: 0,
            lanes: vec![Lane::default(); ranks],
            sides: vec![0; iterations * messages.len()],
            is_ready: arrival_s.iter().map(|&time_s| time_s != ABSENT).collect(),
            messages,
            message_of_input,
            links: link_of_ranks.values().map(|_| LinkQueue::default()).collect(),
            link_of_ranks,
            streams,
            backwards_left: backwards.repeat(iterations),
            optimizers_left: optimizers.repeat(iterations),
            times: Times {
                iterations: u32::try_from(iterations).unwrap_or(u32::MAX),
                offsets,
                start_s: vec![0.0; actions],
                end_s: vec![0.0; actions],
                arrival_s,
                last_backward_s: vec![f64::NEG_INFINITY; iterations * stages],
                step_s: 0.0,
            },
        })
    }

    fn run(&mut self, control: &Control) -> Result<()> {
        let mut ended = 0_u64;
        // Only events start ranks below, and none is pending yet, so start every rank once.
        for rank in 0..self.lanes.len() {
            self.go_on(rank);
        }
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now_s = f64::from_bits(time);
            self.times.step_s = self.times.step_s.max(self.now_s);
            match event {
                Event::Computed { rank } => {
                    self.computed(rank);
                    ended += 1;
                    // Check for cancellation rarely, because reading the shared flag for each event would cost time.
                    if ended.is_multiple_of(1 << 14) && control.is_cancelled() {
                        return Err(Error::Cancelled);
                    }
                }
                Event::Sent { rank } => {
                    self.end_of_message(rank);
                    self.advance_stream(rank);
                }
                Event::LinkFree { link } => {
                    self.links[link].is_busy = false;
                    self.use_link(link);
                }
                Event::Arrived { iteration, message } => self.arrived(iteration, message),
                Event::Optimized { iteration, rank } => {
                    self.optimizers_left[iteration * self.lanes.len() + rank] -= 1;
                    self.try_start(rank);
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Times> {
        let is_over = |(lane, order): (&Lane, &Vec<Action>)| lane.ended == order.len() * self.iterations;
        if self.lanes.iter().zip(&self.schedule.action_lists).all(is_over) {
            return Ok(self.times);
        }
        // No event is pending, so the remaining actions wait for inputs that never arrive.
        Err(self.stuck())
    }

    /// Schedules `event` to occur `delay_s` seconds from now.
    fn push(&mut self, delay_s: f64, event: Event) {
        self.events_pushed += 1;
        // The bits of non-negative floats sort like their values, and are `Ord`. The counter makes simultaneous events
        // occur in the order in which they were pushed, so results are reproducible.
        self.events.push(Reverse(((self.now_s + delay_s).to_bits(), self.events_pushed, event)));
    }

    /// Returns the action at index `count` of a rank, its iteration, and whether it is the first of its iteration.
    fn action(&self, rank: usize, count: usize) -> Option<(Action, usize, bool)> {
        let order = &self.schedule.action_lists[rank];
        let (iteration, position) = (count.checked_div(order.len())?, count.checked_rem(order.len())?);
        (iteration < self.iterations).then(|| (order[position], iteration, position == 0))
    }

    /// Continues a rank that has no running action: posts the messages before its next action, and starts the action if
    /// its inputs are available.
    fn go_on(&mut self, rank: usize) {
        match self.communication {
            Communication::Stream { .. } => self.advance_stream(rank),
            Communication::Rendezvous => self.enter_group(rank),
            Communication::Latency | Communication::Link => {}
        }
        self.try_start(rank);
    }

    fn try_start(&mut self, rank: usize) {
        let lane = &self.lanes[rank];
        let Some((action, iteration, is_first)) = self.action(rank, lane.started) else { return };
        // Wrapping is safe: in iteration 0 the result is unused.
        let last_optimizer = (iteration * self.lanes.len() + rank).wrapping_sub(self.lanes.len());
        let waits_for_optimizer = is_first && iteration > 0 && self.optimizers_left[last_optimizer] > 0;
        if lane.started > lane.ended || lane.in_group > 0 || waits_for_optimizer {
            return;
        }
        // Read `is_ready`, not the arrival time: a message that has arrived may still wait for the receiver's stream.
        let base = iteration * self.inputs.count();
        if !self.inputs.of_action(action).all(|input| self.is_ready[base + input]) {
            return;
        }
        // Events that occur at the same time may all call this. A rank that has started fails the test above.
        let place = self.times.offsets[rank] + lane.started;
        self.times.start_s[place] = self.now_s;
        self.lanes[rank].started += 1;
        self.push(self.costs.duration_s(action), Event::Computed { rank });
    }

    fn computed(&mut self, rank: usize) {
        let count = self.lanes[rank].ended;
        let Some((action, iteration, _)) = self.action(rank, count) else { return };
        self.times.end_s[self.times.offsets[rank] + count] = self.now_s;
        self.lanes[rank].ended += 1;
        for half in action.halves() {
            if half.kind != Kind::Forward {
                self.count_backward(half.stage as usize, iteration);
            }
            let Some(input) = self.inputs.made_ready_by(half) else { continue };
            let Some(&message) = self.message_of_input.get(&input) else {
                // The tensor stays on the rank, so it is available at once and needs no message.
                self.times.arrival_s[iteration * self.inputs.count() + input] = self.now_s;
                self.is_ready[iteration * self.inputs.count() + input] = true;
                continue;
            };
            match self.communication {
                Communication::Latency => {
                    let cost = self.cost(message);
                    self.push(cost.busy_s + cost.latency_s, Event::Arrived { iteration, message });
                }
                Communication::Link => {
                    let link = self.link_of_ranks[&self.messages[message].ranks(self.schedule)];
                    self.links[link].waiting.push_back((iteration, message));
                    self.use_link(link);
                }
                Communication::Stream { .. } | Communication::Rendezvous => {} // `go_on` posts it
            }
        }
        self.go_on(rank);
    }

    /// Counts one backward of a stage. After the last backward of all its copies, schedules their gradient reduction
    /// and optimizer steps.
    fn count_backward(&mut self, stage: usize, iteration: usize) {
        let stages = self.schedule.rank_of_stage.len();
        let chain = self.schedule.stages_per_pipeline as usize;
        self.times.last_backward_s[iteration * stages + stage] = self.now_s;
        let left = &mut self.backwards_left[iteration * chain + stage % chain];
        *left -= 1;
        if *left == 0 {
            for copy in (stage % chain..stages).step_by(chain) {
                let rank = self.schedule.rank_of_stage[copy] as usize;
                let delay_s = self.costs.gradient_sync_s[copy] + self.costs.optimizer_s[copy];
                self.push(delay_s, Event::Optimized { iteration, rank });
            }
        }
    }

    fn cost(&self, message: usize) -> Transfer {
        self.messages[message].cost(self.costs)
    }

    fn use_link(&mut self, link: usize) {
        if self.links[link].is_busy {
            return;
        }
        let Some((iteration, message)) = self.links[link].waiting.pop_front() else { return };
        self.links[link].is_busy = true;
        let cost = self.cost(message);
        self.push(cost.busy_s, Event::LinkFree { link });
        self.push(cost.busy_s + cost.latency_s, Event::Arrived { iteration, message });
    }

    /// Advances a rank's communication stream as far as possible. An entry waits for the actions before it, and a
    /// receive also for its message. A send starts whether or not its receive is posted.
    fn advance_stream(&mut self, rank: usize) {
        while let Some((iteration, entry)) = self.stream_head(rank) {
            let actions_before = iteration * self.schedule.action_lists[rank].len() + entry.behind;
            if self.lanes[rank].is_streaming || self.lanes[rank].ended < actions_before {
                return;
            }
            let input = iteration * self.inputs.count() + self.messages[entry.message].input;
            if entry.is_send {
                self.lanes[rank].is_streaming = true;
                let cost = self.cost(entry.message);
                self.push(cost.busy_s, Event::Sent { rank });
                self.push(cost.busy_s + cost.latency_s, Event::Arrived { iteration, message: entry.message });
            } else if self.times.arrival_s[input] == ABSENT {
                return;
            } else {
                self.is_ready[input] = true;
                self.end_of_message(rank);
                self.try_start(rank);
            }
        }
    }

    /// Returns `(iteration, entry)` of the next entry of a rank's communication stream.
    fn stream_head(&self, rank: usize) -> Option<(usize, StreamEntry)> {
        let (next, stream) = (self.lanes[rank].next_message, &self.streams[rank]);
        let iteration = next.checked_div(stream.len())?;
        (iteration < self.iterations).then(|| (iteration, stream[next % stream.len()]))
    }

    fn end_of_message(&mut self, rank: usize) {
        self.lanes[rank].is_streaming = false;
        self.lanes[rank].next_message += 1;
    }

    /// Posts the messages that a blocking rank sends and receives between its last action and its next.
    fn enter_group(&mut self, rank: usize) {
        let group = self.group(rank);
        self.lanes[rank].in_group = group.len();
        for (iteration, message) in group {
            self.post(iteration, message);
        }
    }

    /// Returns `(iteration, message)` of the sends after the last action of a rank and the receives before its next.
    fn group(&self, rank: usize) -> Vec<(usize, usize)> {
        let ended = self.lanes[rank].ended;
        let mut group = Vec::new();
        if let Some((action, iteration, _)) = ended.checked_sub(1).and_then(|last| self.action(rank, last)) {
            let sent = action.halves().filter_map(|half| self.inputs.made_ready_by(half));
            group.extend(sent.filter_map(|input| Some((iteration, *self.message_of_input.get(&input)?))));
        }
        if let Some((action, iteration, _)) = self.action(rank, ended) {
            let received = self.inputs.of_action(action);
            group.extend(received.filter_map(|input| Some((iteration, *self.message_of_input.get(&input)?))));
        }
        group
    }

    /// Posts one side of a message. The transfer starts when both sides have posted it.
    fn post(&mut self, iteration: usize, message: usize) {
        let sides = &mut self.sides[iteration * self.messages.len() + message];
        *sides += 1;
        if *sides == 2 {
            let cost = self.cost(message);
            self.push(cost.busy_s + cost.latency_s, Event::Arrived { iteration, message });
        }
    }

    fn arrived(&mut self, iteration: usize, message: usize) {
        let Message { input, .. } = self.messages[message];
        let (from, to) = self.messages[message].ranks(self.schedule);
        let input = iteration * self.inputs.count() + input;
        self.times.arrival_s[input] = self.now_s;
        match self.communication {
            // An arrived message still waits for the receiver's stream, which may be blocked by an earlier entry.
            Communication::Stream { .. } => self.advance_stream(to),
            Communication::Latency | Communication::Link => {
                self.is_ready[input] = true;
                self.try_start(to);
            }
            Communication::Rendezvous => {
                self.is_ready[input] = true;
                // A blocking send also holds up its sender, so both ranks may continue now.
                for rank in [from, to] {
                    self.lanes[rank].in_group -= 1;
                    self.try_start(rank);
                }
            }
        }
    }

    /// Returns the error of a run that stopped early. Follows from rank to rank which message each of them waits for.
    fn stuck(&self) -> Error {
        let mut waits = Vec::new();
        let unfinished = |rank: &usize| self.action(*rank, self.lanes[*rank].ended).is_some();
        let mut at = (0..self.lanes.len()).find(|&rank| self.pending(rank).is_some());
        let mut seen = vec![false; self.lanes.len()];
        while let Some(rank) = at.filter(|&rank| !seen[rank]) {
            seen[rank] = true;
            let Some((message, sends)) = self.pending(rank) else { break };
            let (from, to) = message.ranks(self.schedule);
            let (operation, peer) =
                if sends { (Operation::Send(message), to) } else { (Operation::Receive(message), from) };
            waits.push(format!("rank {rank} waits at {operation} for rank {peer}"));
            at = Some(peer);
        }
        if waits.is_empty() {
            let rank = (0..self.lanes.len()).find(unfinished).unwrap_or(0);
            waits.push(format!("rank {rank} never gets the input of its next action"));
        }
        Error::schedule(
            format!("`{}` deadlocks: {}", self.schedule.name, waits.join("; ")),
            "use asynchronous communication (`latency` or `link`), or validate the order of the actions",
        )
    }

    /// Returns the first blocking message that only this rank has posted, and whether the rank sends it.
    fn pending(&self, rank: usize) -> Option<(Message, bool)> {
        if self.communication != Communication::Rendezvous {
            return None;
        }
        let group = self.group(rank);
        let is_alone =
            |&&(iteration, message): &&(usize, usize)| self.sides[iteration * self.messages.len() + message] == 1;
        let (_, message) = *group.iter().find(is_alone)?;
        let message = self.messages[message];
        Some((message, message.ranks(self.schedule).0 == rank))
    }
}

fn stream_of(list: &[Operation], message_of_input: &FxHashMap<usize, usize>) -> Vec<StreamEntry> {
    let mut behind = 0;
    let mut stream = Vec::new();
    for operation in list {
        match operation {
            Operation::Compute(_) => behind += 1,
            Operation::Send(message) | Operation::Receive(message) => {
                let is_send = matches!(operation, Operation::Send(_));
                stream.push(StreamEntry { message: message_of_input[&message.input], is_send, behind });
            }
        }
    }
    stream
}
