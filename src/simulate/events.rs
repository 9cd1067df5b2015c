//! Runs a schedule on a heap of events: whatever ends next decides what starts next.
//!
//! Slower than the sweep and independent of it, but it also knows ranks that wait for their messages: one in-order
//! stream a rank, and blocking sends and receives. Several steps run back to back.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rustc_hash::FxHashMap;

use super::communication::{Message, Operation, with_communication};
use super::{Communication, Costs, Inputs, Times, Transfer};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, Kind, Schedule};

/// Runs `iterations` steps; a rank starts the next one when the optimizer steps of all its stages have ended.
///
/// # Errors
/// [`Error::Argument`] if `costs` doesn't fit the schedule or `iterations` is 0, [`Error::Schedule`] if actions or
/// messages wait for each other for ever, [`Error::Cancelled`] if `control` says so.
pub fn times(
    schedule: &Schedule,
    costs: &Costs,
    communication: Communication,
    iterations: u32,
    control: &Control,
) -> Result<Times> {
    costs.check(schedule)?;
    if iterations == 0 {
        return Err(Error::argument("`iterations` is 0", "simulate at least one step"));
    }
    let mut machine = Machine::new(schedule, costs, communication, iterations as usize)?;
    machine.run(control)?;
    machine.finish()
}

/// Not there yet.
const ABSENT: f64 = f64::INFINITY;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The running action of a rank ends.
    Computed { rank: usize },
    /// A rank's communication stream has sent its head.
    Sent { rank: usize },
    /// A link can take its next message.
    LinkFree { link: usize },
    /// An input of an iteration is there.
    Arrived { iteration: usize, message: usize },
    /// The optimizer step of one stage of a rank ends.
    Optimized { iteration: usize, rank: usize },
}

/// Where a rank stands; actions are counted over all iterations.
#[derive(Debug, Clone, Default)]
struct Lane {
    started: usize,
    ended: usize,
    /// Sends and receives of a blocking group that are not through.
    in_group: usize,
    /// Next entry of the communication stream, over all iterations, and whether the stream is busy with it.
    next_message: usize,
    is_streaming: bool,
}

#[derive(Debug, Default)]
struct LinkQueue {
    is_busy: bool,
    waiting: VecDeque<(usize, usize)>,
}

/// One entry of a communication stream.
#[derive(Debug, Clone, Copy)]
struct StreamEntry {
    message: usize,
    is_send: bool,
    /// It is issued behind this many actions of the iteration, and waits for them.
    behind: usize,
}

struct Machine<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    communication: Communication,
    iterations: usize,
    inputs: Inputs,
    now_s: f64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events_pushed: u64,
    lanes: Vec<Lane>,
    /// All messages of an iteration, and which of them makes an input ready.
    messages: Vec<Message>,
    message_of_input: FxHashMap<usize, usize>,
    link_of_ranks: FxHashMap<(usize, usize), usize>,
    links: Vec<LinkQueue>,
    streams: Vec<Vec<StreamEntry>>,
    /// `[iteration][message]`: how many sides of a blocking message are there.
    sides: Vec<u8>,
    /// `[iteration][input]`: received.
    is_ready: Vec<bool>,
    /// `[iteration][stage of the chain]`: backwards to come, over all chains.
    backwards_left: Vec<usize>,
    /// `[iteration][rank]`: stages whose optimizer step hasn't ended.
    optimizers_left: Vec<usize>,
    times: Times,
}

impl<'a> Machine<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs, communication: Communication, iterations: usize) -> Result<Self> {
        let inputs = Inputs::of(schedule);
        let chain = schedule.chain_length as usize;
        let stages = schedule.rank_of_stage.len();
        let ranks = schedule.orders.len();

        let mut messages = Vec::new();
        let mut backwards = vec![0; chain];
        for half in schedule.orders.iter().flatten().flat_map(|action| action.halves()) {
            messages.extend(Message::sent_by(half, schedule, inputs));
            if half.kind != Kind::Forward {
                backwards[half.stage as usize % chain] += 1;
            }
        }
        let message_of_input: FxHashMap<usize, usize> =
            messages.iter().enumerate().map(|(number, message)| (message.input, number)).collect();
        let mut link_of_ranks = FxHashMap::default();
        for message in &messages {
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
            optimizers[rank as usize] += usize::from(backwards[stage % chain] > 0);
        }
        let mut arrival_s = vec![ABSENT; inputs.count()];
        for (index, ids) in schedule.micro_batches.iter().enumerate() {
            let first_stage = u32::try_from(index).unwrap_or(0) * schedule.chain_length;
            for input in ids.clone().flat_map(|id| inputs.of_action(Action::forward(first_stage, id))) {
                arrival_s[input] = 0.0;
            }
        }
        let arrival_s = arrival_s.repeat(iterations);
        let mut offsets = vec![0];
        offsets.extend(schedule.orders.iter().scan(0, |sum, order| {
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
        if self.lanes.iter().zip(&self.schedule.orders).all(is_over) {
            return Ok(self.times);
        }
        Err(self.stuck())
    }

    /// After `delay_s`, `event`. Times are not negative, so their bits order as they do.
    fn push(&mut self, delay_s: f64, event: Event) {
        self.events_pushed += 1;
        self.events.push(Reverse(((self.now_s + delay_s).to_bits(), self.events_pushed, event)));
    }

    /// The action that a rank runs or would run next, its iteration and whether it is the first of it.
    fn action(&self, rank: usize, count: usize) -> Option<(Action, usize, bool)> {
        let order = &self.schedule.orders[rank];
        let (iteration, position) = (count.checked_div(order.len())?, count.checked_rem(order.len())?);
        (iteration < self.iterations).then(|| (order[position], iteration, position == 0))
    }

    /// A rank has nothing running: posts what stands before its next action, and starts it if nothing is missing.
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
        let last_optimizer = (iteration * self.lanes.len() + rank).wrapping_sub(self.lanes.len());
        let waits_for_optimizer = is_first && iteration > 0 && self.optimizers_left[last_optimizer] > 0;
        if lane.started > lane.ended || lane.in_group > 0 || waits_for_optimizer {
            return;
        }
        let base = iteration * self.inputs.count();
        if !self.inputs.of_action(action).all(|input| self.is_ready[base + input]) {
            return;
        }
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
                // It stays on the rank.
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

    /// One backward of a stage less to come; behind the last one of all its copies they synchronise.
    fn count_backward(&mut self, stage: usize, iteration: usize) {
        let stages = self.schedule.rank_of_stage.len();
        let chain = self.schedule.chain_length as usize;
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

    /// Lets a rank's communication stream go on, as far as it can now: an entry waits for the actions before it, a
    /// receive also for its message. A send leaves whether or not its receive is posted.
    fn advance_stream(&mut self, rank: usize) {
        while let Some((iteration, entry)) = self.stream_head(rank) {
            let actions_before = iteration * self.schedule.orders[rank].len() + entry.behind;
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

    /// `(iteration, entry)` at which a rank's communication stream stands.
    fn stream_head(&self, rank: usize) -> Option<(usize, StreamEntry)> {
        let (next, stream) = (self.lanes[rank].next_message, &self.streams[rank]);
        let iteration = next.checked_div(stream.len())?;
        (iteration < self.iterations).then(|| (iteration, stream[next % stream.len()]))
    }

    fn end_of_message(&mut self, rank: usize) {
        self.lanes[rank].is_streaming = false;
        self.lanes[rank].next_message += 1;
    }

    /// Posts what a blocking rank sends and receives between its last action and its next.
    fn enter_group(&mut self, rank: usize) {
        let group = self.group(rank);
        self.lanes[rank].in_group = group.len();
        for (iteration, message) in group {
            self.post(iteration, message);
        }
    }

    /// `(iteration, message)` of the sends behind the last action of a rank and the receives before its next.
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

    /// One side of a message waits for the other; with both there, it travels.
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
            Communication::Stream { .. } => self.advance_stream(to),
            Communication::Latency | Communication::Link => {
                self.is_ready[input] = true;
                self.try_start(to);
            }
            Communication::Rendezvous => {
                self.is_ready[input] = true;
                for rank in [from, to] {
                    self.lanes[rank].in_group -= 1;
                    self.try_start(rank);
                }
            }
        }
    }

    /// The error of a run that stopped early: follows from rank to rank what each of them waits for.
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
            waits.push(format!("rank {rank} stands at {operation} until rank {peer} comes to it"));
            at = Some(peer);
        }
        if waits.is_empty() {
            let rank = (0..self.lanes.len()).find(unfinished).unwrap_or(0);
            waits.push(format!("rank {rank} never gets the input of its next action"));
        }
        Error::schedule(
            format!("`{}` never ends: {}", self.schedule.name, waits.join("; ")),
            "use asynchronous communication (`latency` or `link`), or validate the order of the actions",
        )
    }

    /// The first blocking message at which a rank stands alone, and whether it sends it.
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
