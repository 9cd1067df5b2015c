//! Paths within host counts: labels grow from position 0, fewest hosts first, and are dropped when prices or another
//! label show that they lead to nothing better.
//!
//! A label is a position, the crew that got there, the hosts used by type and the value so far. Labels with the same
//! hosts meet in one place, so what arrives further ahead for no more value replaces the rest. Each number of hosts is
//! a bucket; a bucket keeps its most promising labels up to a width. As long as none had to go, finding nothing is a
//! proof.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use super::cost::Step;
use super::dual_prices::Prices;
use super::feasible_edges::FeasibleEdges;
use super::problem::{HostType, Objective};
use crate::control::Control;

/// What a search with some width found.
pub(super) struct Found {
    /// The best path and its value.
    pub(super) best: Option<(Vec<Step>, f64)>,
    /// Nothing else is below the value that was asked for: no label had to go for want of room or time.
    pub(super) complete: bool,
    /// Stages that were looked at.
    pub(super) looked_at: u64,
}

/// Looks for a path whose value is at most `below`; one of value `v` found, for one of at most `better(v)`, and so on.
///
/// A bucket keeps `width` labels.
pub(super) fn search(
    feasible_edges: &FeasibleEdges<'_>,
    prices: &[Prices],
    below: f64,
    better: fn(f64) -> f64,
    width: usize,
    control: &Control,
) -> Found {
    let layout = Layout::new(feasible_edges);
    match layout.words {
        0..=1 => Search::<1>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        2 => Search::<2>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        3..=4 => Search::<4>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        5..=16 => Search::<16>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        _ => Search::<128>::new(feasible_edges, prices, &layout, below, better, width).run(control),
    }
}

/// Where the count of each type sits in a row of 64-bit words.
struct Layout {
    fields: Vec<(usize, u32, u64)>,
    words: usize,
}

impl Layout {
    fn new(feasible_edges: &FeasibleEdges<'_>) -> Self {
        let mut fields = Vec::new();
        let (mut word, mut shift) = (0, 0);
        for host in &feasible_edges.costs.chain.types {
            let bits = usize::BITS - host.hosts.leading_zeros();
            if shift + bits > u64::BITS {
                (word, shift) = (word + 1, 0);
            }
            fields.push((word, shift, (1_u64 << bits) - 1));
            shift += bits;
        }
        Self { fields, words: word + 1 }
    }

    /// Hosts of type `kind` that are not in `used`.
    fn free<const W: usize>(&self, feasible_edges: &FeasibleEdges<'_>, used: &[u64; W], kind: usize) -> u64 {
        let (word, shift, mask) = self.fields[kind];
        feasible_edges.costs.chain.types[kind].hosts as u64 - ((used[word] >> shift) & mask)
    }
}

#[derive(Clone, Copy)]
struct Label<const W: usize> {
    used: [u64; W],
    /// Value so far.
    value: f64,
    /// No plan that continues this has a smaller value.
    bound: f64,
    /// What a bucket sorts by: the bound, and how unevenly types are used up.
    rank: f64,
    position: u32,
    crew: u32,
    /// Where it came from: index into `Search::trail`.
    parent: u32,
    /// Next label with the same hosts in its bucket.
    next: u32,
}

impl<const W: usize> Label<W> {
    /// What labels share that are compared: where positions are not in a row, only one at the same position is as good.
    fn key(&self, in_a_row: bool) -> ([u64; W], u32) {
        (self.used, if in_a_row { 0 } else { self.position })
    }
}

const NONE: u32 = u32::MAX;
/// Position of a label that another one made useless.
const DEAD: u32 = u32::MAX;

struct Bucket<const W: usize> {
    labels: Vec<Label<W>>,
    /// First label with these hosts, and at this position where positions are not in a row.
    by_hosts: FxHashMap<([u64; W], u32), u32>,
}

struct Search<'a, const W: usize> {
    feasible_edges: &'a FeasibleEdges<'a>,
    prices: &'a [Prices],
    layout: &'a Layout,
    /// Labels whose bound is above this lead to nothing.
    below: f64,
    better: fn(f64) -> f64,
    width: usize,
    /// Label that was continued: position, crew, parent.
    trail: Vec<(u32, u32, u32)>,
    buckets: Vec<Bucket<W>>,
    best: Option<(u32, usize, f64)>,
    complete: bool,
    looked_at: u64,
}

impl<'a, const W: usize> Search<'a, W> {
    fn new(
        feasible_edges: &'a FeasibleEdges<'a>,
        prices: &'a [Prices],
        layout: &'a Layout,
        below: f64,
        better: fn(f64) -> f64,
        width: usize,
    ) -> Self {
        let room = 1_500_000_000 / (8 * size_of::<Label<W>>());
        Self {
            feasible_edges,
            prices,
            layout,
            below,
            better,
            width: width.min(room),
            trail: Vec::new(),
            buckets: Vec::new(),
            best: None,
            complete: true,
            looked_at: 0,
        }
    }

    fn run(mut self, control: &Control) -> Found {
        let start = Label {
            used: [0; W],
            value: 0.0,
            bound: 0.0,
            rank: 0.0,
            position: 0,
            crew: NONE,
            parent: NONE,
            next: NONE,
        };
        self.expand(&start, NONE, 0);
        let mut hosts = 0;
        'buckets: while hosts < self.buckets.len() {
            let bucket = std::mem::replace(&mut self.buckets[hosts], Bucket::new());
            let labels = self.most_promising(bucket.labels);
            for (index, label) in labels.iter().enumerate() {
                if index % 256 == 0 && control.should_stop() {
                    self.complete = false;
                    break 'buckets;
                }
                if label.bound > self.below {
                    continue;
                }
                if self.trail.len() >= NONE as usize / 16 {
                    self.complete = false;
                    break 'buckets;
                }
                let parent = u32::try_from(self.trail.len()).expect("the trail is kept below 2^28");
                self.trail.push((label.position, label.crew, label.parent));
                self.expand(label, parent, hosts);
            }
            hosts += 1;
        }
        Found {
            best: self.best.map(|(parent, crew, value)| (self.path(parent, crew), value)),
            complete: self.complete,
            looked_at: self.looked_at,
        }
    }

    /// Labels that are alive, the `width` of the first ranks.
    fn most_promising(&mut self, mut labels: Vec<Label<W>>) -> Vec<Label<W>> {
        labels.retain(|label| label.position != DEAD && label.bound <= self.below);
        if labels.len() > self.width {
            self.complete = false;
            labels.select_nth_unstable_by(self.width, |one, other| {
                one.rank
                    .total_cmp(&other.rank)
                    .then(other.position.cmp(&one.position))
                    .then(one.used.cmp(&other.used))
                    .then(one.crew.cmp(&other.crew))
            });
            labels.truncate(self.width);
        }
        labels
    }

    /// Adds every stage that may follow `label`, which has used `hosts` hosts.
    fn expand(&mut self, label: &Label<W>, parent: u32, hosts: usize) {
        let feasible_edges = self.feasible_edges;
        let costs = feasible_edges.costs;
        let first = label.position as usize;
        let before = (label.crew != NONE).then_some(label.crew as usize);
        // What the hosts that are left would cost: the part of the budget that remains.
        let left: Vec<f64> = self
            .prices
            .iter()
            .map(|prices| {
                let prices = prices.of_host.iter().enumerate();
                prices.map(|(kind, price)| price * self.layout.free(feasible_edges, &label.used, kind) as f64).sum()
            })
            .collect();
        for (crew, &super::cost::HostSet { kind, replicas }) in costs.crews.iter().enumerate() {
            if replicas as u64 > self.layout.free(feasible_edges, &label.used, kind) {
                continue;
            }
            let Some(hop) = feasible_edges.hop_value(first, before, Some(crew)) else { continue };
            let (word, shift, _) = self.layout.fields[kind];
            let mut used = label.used;
            used[word] += (replicas as u64) << shift;
            let uneven = self.unevenness(&used);
            for end in feasible_edges.ends(crew, first) {
                self.looked_at += 1;
                let value = label.value + hop + feasible_edges.stage_value(crew, first, end);
                let bound = self
                    .prices
                    .iter()
                    .zip(&left)
                    .map(|(prices, left)| {
                        value + prices.way_on(crew, end) - (left - prices.of_host[kind] * replicas as f64)
                    })
                    .fold(value, f64::max);
                if bound > self.below {
                    continue;
                }
                if end == costs.last {
                    let Some(last) = feasible_edges.hop_value(end, Some(crew), None) else { continue };
                    if value + last <= self.below {
                        self.finish(parent, crew, value + last);
                    }
                    continue;
                }
                let position = u32::try_from(end).expect("layers are checked to be at most a million");
                let crew = u32::try_from(crew).expect("crews are as many as hosts");
                self.arrive(
                    hosts + replicas,
                    Label { used, value, bound, rank: bound + uneven, position, crew, parent, next: NONE },
                );
            }
        }
    }

    /// How far single types are used up: among labels of one bound, those that leave some of every type go further.
    fn unevenness(&self, used: &[u64; W]) -> f64 {
        let types = &self.feasible_edges.costs.chain.types;
        if self.feasible_edges.objective != Objective::Throughput {
            return 0.0; // there, bounds are values of plans, not shares of the hosts
        }
        let share = |(kind, host): (usize, &HostType)| {
            1.0 - self.layout.free(self.feasible_edges, used, kind) as f64 / (host.hosts as f64).max(1.0)
        };
        0.2 * types.iter().enumerate().map(share).map(|share| share * share).sum::<f64>() / types.len() as f64
    }

    fn finish(&mut self, parent: u32, crew: usize, value: f64) {
        self.best = Some((parent, crew, value));
        self.below = (self.better)(value);
    }

    /// Puts a label into its bucket, unless one with the same hosts is at least as good; removes those that it beats.
    fn arrive(&mut self, hosts: usize, mut label: Label<W>) {
        while self.buckets.len() <= hosts {
            self.buckets.push(Bucket::new());
        }
        let in_a_row = self.feasible_edges.costs.is_row();
        // Far more than the width will keep: make room now rather than hold them all.
        if self.buckets[hosts].labels.len() >= 4 * self.width + 256 {
            let labels = std::mem::take(&mut self.buckets[hosts].labels);
            let kept = self.most_promising(labels);
            self.buckets[hosts] = Bucket::of(kept, in_a_row);
        }
        let feasible_edges = self.feasible_edges;
        let beats = |one: &Label<W>, other: &Label<W>| {
            one.value <= other.value
                && if one.position == other.position && one.crew == other.crew {
                    true
                } else {
                    one.position >= other.position && feasible_edges.is_best_so_far(one.position as usize)
                }
        };
        let Bucket { labels, by_hosts } = &mut self.buckets[hosts];
        let index = u32::try_from(labels.len()).expect("a bucket is kept far below 2^32 labels");
        match by_hosts.entry(label.key(in_a_row)) {
            Entry::Vacant(entry) => {
                entry.insert(index);
            }
            Entry::Occupied(mut entry) => {
                let mut at = *entry.get();
                while at != NONE {
                    let other = &mut labels[at as usize];
                    if other.position != DEAD {
                        if beats(other, &label) {
                            return;
                        }
                        if beats(&label, other) {
                            other.position = DEAD;
                        }
                    }
                    at = other.next;
                }
                label.next = *entry.get();
                entry.insert(index);
            }
        }
        labels.push(label);
    }

    fn path(&self, parent: u32, crew: usize) -> Vec<Step> {
        let mut path = Vec::new();
        let (mut at, mut crew, mut end) = (parent, crew, self.feasible_edges.costs.last);
        loop {
            let before = (at != NONE).then(|| self.trail[at as usize]);
            let first = before.map_or(0, |(position, _, _)| position as usize);
            path.push(Step { crew, first, end });
            let Some((position, previous, parent)) = before else { break };
            (at, crew, end) = (parent, previous as usize, position as usize);
        }
        path.reverse();
        path
    }
}

impl<const W: usize> Bucket<W> {
    fn new() -> Self {
        Self { labels: Vec::new(), by_hosts: FxHashMap::default() }
    }

    fn of(mut labels: Vec<Label<W>>, in_a_row: bool) -> Self {
        let mut by_hosts = FxHashMap::default();
        for (index, label) in labels.iter_mut().enumerate() {
            let index = u32::try_from(index).expect("a bucket is kept far below 2^32 labels");
            label.next = by_hosts.insert(label.key(in_a_row), index).unwrap_or(NONE);
        }
        Self { labels, by_hosts }
    }
}
