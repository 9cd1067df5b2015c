//! Paths within host counts, found by a label search from position 0 on. Labels with the fewest hosts are extended
//! first, and labels are dropped if dual prices or another label show that they lead to nothing better.
//!
//! A label is a position, the host set that reached it, the hosts used by type, and the value so far. Labels with equal
//! hosts compete, so a label that is further ahead at no higher value replaces the others. Labels with equal numbers of
//! hosts form a bucket, which keeps its most promising labels up to a width. As long as no label had to be dropped for
//! the width, finding nothing is a proof.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use super::cost::Step;
use super::dual_prices::DualPrices;
use super::feasible_edges::FeasibleEdges;
use super::problem::{HostType, Objective};
use crate::control::Control;

/// Result of a search with a given width.
pub(super) struct Found {
    /// The best path found, with its value.
    pub(super) best: Option<(Vec<Step>, f64)>,
    /// Whether no other path has a value below the one asked for: no label was dropped for lack of memory or time.
    pub(super) complete: bool,
    /// Number of stages that were evaluated.
    pub(super) looked_at: u64,
}

/// Searches a path with a value of at most `below`. After finding one of value `v`, searches one of at most
/// `better(v)`, and so on.
///
/// A bucket keeps at most `width` labels.
pub(super) fn search(
    feasible_edges: &FeasibleEdges<'_>,
    prices: &[DualPrices],
    below: f64,
    better: fn(f64) -> f64,
    width: usize,
    control: &Control,
) -> Found {
    let layout = Layout::new(feasible_edges);
    // The host counts of a label are packed in an array of fixed size, so that labels are copied without allocation. A
    // few sizes cover all problems.
    match layout.words {
        0..=1 => Search::<1>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        2 => Search::<2>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        3..=4 => Search::<4>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        5..=16 => Search::<16>::new(feasible_edges, prices, &layout, below, better, width).run(control),
        _ => Search::<128>::new(feasible_edges, prices, &layout, below, better, width).run(control),
    }
}

/// Positions of the host counts in an array of 64-bit words: word, shift and mask for each type.
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

    /// Returns the number of hosts of type `kind` that are not in `used`.
    fn free<const W: usize>(&self, feasible_edges: &FeasibleEdges<'_>, used: &[u64; W], kind: usize) -> u64 {
        let (word, shift, mask) = self.fields[kind];
        feasible_edges.costs.chain.types[kind].hosts as u64 - ((used[word] >> shift) & mask)
    }
}

/// A partial plan from position 0 to `position`.
#[derive(Clone, Copy)]
struct Label<const W: usize> {
    used: [u64; W],
    /// Value of the stages and hops so far.
    value: f64,
    /// Lower bound on the value of every plan that continues this label.
    bound: f64,
    /// Key by which a bucket sorts: the bound, plus a term for unevenly used types.
    rank: f64,
    position: u32,
    host_set: u32,
    /// Index of the label that it extends, in `Search::trail`.
    parent: u32,
    /// Next label with the same hosts in its bucket.
    next: u32,
}

impl<const W: usize> Label<W> {
    /// Returns the key that competing labels share. If positions are not all nested, only labels at the same position
    /// compete.
    fn key(&self, in_a_row: bool) -> ([u64; W], u32) {
        (self.used, if in_a_row { 0 } else { self.position })
    }
}

/// Index that stands for no label and no host set.
const NONE: u32 = u32::MAX;
/// Position of a label that another label has replaced.
const DEAD: u32 = u32::MAX;

/// Labels with the same number of hosts.
struct Bucket<const W: usize> {
    labels: Vec<Label<W>>,
    /// Index of the first label with given hosts, and at a given position if positions are not all nested.
    by_hosts: FxHashMap<([u64; W], u32), u32>,
}

/// State of a label search.
struct Search<'a, const W: usize> {
    feasible_edges: &'a FeasibleEdges<'a>,
    prices: &'a [DualPrices],
    layout: &'a Layout,
    /// Largest value of interest. Labels with a bound above it are dropped.
    below: f64,
    better: fn(f64) -> f64,
    width: usize,
    /// Labels that were extended: position, host set, parent. Only these are needed to rebuild a path.
    trail: Vec<(u32, u32, u32)>,
    buckets: Vec<Bucket<W>>,
    best: Option<(u32, usize, f64)>,
    complete: bool,
    looked_at: u64,
}

impl<'a, const W: usize> Search<'a, W> {
    fn new(
        feasible_edges: &'a FeasibleEdges<'a>,
        prices: &'a [DualPrices],
        layout: &'a Layout,
        below: f64,
        better: fn(f64) -> f64,
        width: usize,
    ) -> Self {
        // Limits a bucket to about 1.5 GB. The factor 8 leaves space for the labels between two truncations and for
        // their index.
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
            host_set: NONE,
            parent: NONE,
            next: NONE,
        };
        self.expand(&start, NONE, 0);
        let mut hosts = 0;
        // A stage uses at least one host, so labels only enter later buckets, and each bucket is complete when it is
        // reached.
        'buckets: while hosts < self.buckets.len() {
            let bucket = std::mem::replace(&mut self.buckets[hosts], Bucket::new());
            let labels = self.keep_best(bucket.labels);
            for (index, label) in labels.iter().enumerate() {
                if index % 256 == 0 && control.should_stop() {
                    self.complete = false;
                    break 'buckets;
                }
                if label.bound > self.below {
                    continue;
                }
                // Indices are 32 bits wide, and a trail of this length takes gigabytes.
                if self.trail.len() >= NONE as usize / 16 {
                    self.complete = false;
                    break 'buckets;
                }
                let parent = u32::try_from(self.trail.len()).expect("the trail is kept below 2^28");
                self.trail.push((label.position, label.host_set, label.parent));
                self.expand(label, parent, hosts);
            }
            hosts += 1;
        }
        Found {
            best: self.best.map(|(parent, host_set, value)| (self.path(parent, host_set), value)),
            complete: self.complete,
            looked_at: self.looked_at,
        }
    }

    /// Returns the live labels of a bucket, at most the `width` labels of the lowest rank.
    fn keep_best(&mut self, mut labels: Vec<Label<W>>) -> Vec<Label<W>> {
        labels.retain(|label| label.position != DEAD && label.bound <= self.below);
        if labels.len() > self.width {
            self.complete = false;
            labels.select_nth_unstable_by(self.width, |one, other| {
                // Ties are broken by content, so that the choice does not depend on the order of labels.
                one.rank
                    .total_cmp(&other.rank)
                    .then(other.position.cmp(&one.position))
                    .then(one.used.cmp(&other.used))
                    .then(one.host_set.cmp(&other.host_set))
            });
            labels.truncate(self.width);
        }
        labels
    }

    /// Adds a label for every stage that may follow `label`, which has used `hosts` hosts.
    fn expand(&mut self, label: &Label<W>, parent: u32, hosts: usize) {
        let feasible_edges = self.feasible_edges;
        let costs = feasible_edges.costs;
        let first = label.position as usize;
        let before = (label.host_set != NONE).then_some(label.host_set as usize);
        // Lagrangian budget: at dual prices, the hosts that are left are worth this much. A continuation whose cost
        // exceeds it by more than the value allows can't be completed.
        let left: Vec<f64> = self
            .prices
            .iter()
            .map(|prices| {
                let prices = prices.of_host.iter().enumerate();
                prices.map(|(kind, price)| price * self.layout.free(feasible_edges, &label.used, kind) as f64).sum()
            })
            .collect();
        for (host_set, &super::cost::HostSet { kind, replicas }) in costs.host_sets.iter().enumerate() {
            if replicas as u64 > self.layout.free(feasible_edges, &label.used, kind) {
                continue;
            }
            let Some(hop) = feasible_edges.hop_value(first, before, Some(host_set)) else { continue };
            let (word, shift, _) = self.layout.fields[kind];
            let mut used = label.used;
            used[word] += (replicas as u64) << shift;
            let uneven = self.unevenness(&used);
            for end in feasible_edges.ends(host_set, first) {
                self.looked_at += 1;
                let value = label.value + hop + feasible_edges.stage_value(host_set, first, end);
                let bound = self
                    .prices
                    .iter()
                    .zip(&left)
                    .map(|(prices, left)| {
                        value + prices.way_on(host_set, end) - (left - prices.of_host[kind] * replicas as f64)
                    })
                    .fold(value, f64::max);
                if bound > self.below {
                    continue;
                }
                if end == costs.last {
                    let Some(last) = feasible_edges.hop_value(end, Some(host_set), None) else { continue };
                    if value + last <= self.below {
                        self.finish(parent, host_set, value + last);
                    }
                    continue;
                }
                let position = u32::try_from(end).expect("layers are checked to be at most a million");
                let host_set = u32::try_from(host_set).expect("host_sets are as many as hosts");
                self.arrive(
                    hosts + replicas,
                    Label { used, value, bound, rank: bound + uneven, position, host_set, parent, next: NONE },
                );
            }
        }
    }

    /// Returns a measure of how unevenly types are used. Of two labels with equal bounds, the one that leaves some
    /// hosts of every type usually gets further.
    fn unevenness(&self, used: &[u64; W]) -> f64 {
        let types = &self.feasible_edges.costs.chain.types;
        if self.feasible_edges.objective != Objective::Throughput {
            return 0.0; // bounds are values of plans for other objectives, so the term would distort them
        }
        let share = |(kind, host): (usize, &HostType)| {
            1.0 - self.layout.free(self.feasible_edges, used, kind) as f64 / (host.hosts as f64).max(1.0)
        };
        0.2 * types.iter().enumerate().map(share).map(|share| share * share).sum::<f64>() / types.len() as f64
    }

    /// Stores a better path, and lowers the value of interest.
    fn finish(&mut self, parent: u32, host_set: usize, value: f64) {
        self.best = Some((parent, host_set, value));
        self.below = (self.better)(value);
    }

    /// Adds a label to its bucket unless a competing label is at least as good, and drops competing labels that it
    /// beats.
    fn arrive(&mut self, hosts: usize, mut label: Label<W>) {
        while self.buckets.len() <= hosts {
            self.buckets.push(Bucket::new());
        }
        let in_a_row = self.feasible_edges.costs.is_row();
        // The bucket holds far more labels than its width, so drop the worst now to bound the memory.
        if self.buckets[hosts].labels.len() >= 4 * self.width + 256 {
            let labels = std::mem::take(&mut self.buckets[hosts].labels);
            let kept = self.keep_best(labels);
            self.buckets[hosts] = Bucket::of(kept, in_a_row);
        }
        let feasible_edges = self.feasible_edges;
        // A label further ahead is better only where starting later can't cost memory or bandwidth.
        let beats = |one: &Label<W>, other: &Label<W>| {
            one.value <= other.value
                && if one.position == other.position && one.host_set == other.host_set {
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
                            // Marked instead of removed, because indices of other labels must stay valid.
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

    /// Rebuilds the path of a label from its chain of parents.
    fn path(&self, parent: u32, host_set: usize) -> Vec<Step> {
        let mut path = Vec::new();
        let (mut at, mut host_set, mut end) = (parent, host_set, self.feasible_edges.costs.last);
        loop {
            let before = (at != NONE).then(|| self.trail[at as usize]);
            let first = before.map_or(0, |(position, _, _)| position as usize);
            path.push(Step { host_set, first, end });
            let Some((position, previous, parent)) = before else { break };
            (at, host_set, end) = (parent, previous as usize, position as usize);
        }
        path.reverse();
        path
    }
}

// A bucket is a list with an index by hosts: labels with equal hosts form a linked list through `next`.
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
