//! Lemma *Links of any placement* (docs/proofs.md#links-of-any-placement): the shortest transfers and gradient
//! all-reduces of neighboring stages over all placements.
//!
//! A stage is on *one* node or *spread* over several. If a node has the fraction `x` of the senders and the fraction
//! `y` of the receivers, `max(x (1 - y), y (1 - x))` of a cut's bytes pass its port ([`Cluster::transfer`]), and the
//! fullest port decides. If all devices of both stages share one node, nothing passes any port: the stages are *beside*
//! each other. Otherwise, with `k` nodes of at most `d` devices:
//!
//! - Two stages on one node each: all bytes pass.
//! - One stage of `A` devices on one node, one of `B` devices spread over `m` nodes: the first node has at most
//!   `min(B - m + 1, d - A)` receivers, and the bytes for all others pass.
//! - Both spread: `x + y` is at least `2 / k` on one node, `x` is at least `1 / m` on one, and `y` at least `1 / n` on
//!   one. Each of these nodes passes at least what passes with the best numbers of devices `a + b <= d` that have such
//!   fractions.
//!
//! Replica counts that give the same samples per replica form one range, and node counts form ranges, too. Each bound
//! takes the end of the range at which it is lowest: few nodes reduce gradients faster, and many nodes share the
//! traffic.

use crate::planner::effort::tables;
use crate::planner::hybrid::subproblem::Subproblem;
use std::ops::Range;
use std::sync::OnceLock;

use crate::cost::network::{Cluster, Link, Rate};

/// Smallest and largest number of devices, or of nodes, of a stage.
pub(crate) type Span = (u32, u32);

/// A stage on several nodes, described by its ranges of devices and of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spread {
    pub devices: Span,
    pub nodes: Span,
}

/// Smallest and largest fraction of a spread stage that 0, 1, 2 … of its devices are.
type Fractions = Vec<(f64, f64)>;

/// Lower bounds on transfers and all-reduces of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    cluster: Cluster,
    /// Number of nodes of the cluster.
    pub nodes: u32,
    /// Devices of the largest node.
    pub widest: u32,
    /// Whether a stage is on one node if it fits there, and takes whole nodes otherwise.
    whole: bool,
    /// Ranges of replicas with the same samples per replica, fewest first.
    pub spans: Vec<Span>,
    /// The same replica counts in fewer ranges. Pairs of them are compared faster, and their bounds are lower.
    groups: Vec<Span>,
    /// Shortest transfer from each spread stage to any other spread stage, found on first use.
    nearest: OnceLock<Vec<(Spread, Rate)>>,
}

impl Links {
    /// Returns the bounds of a subproblem's cluster.
    pub(crate) fn new(task: &Subproblem<'_>, whole: bool) -> Self {
        let cluster = task.cluster.clone();
        let mut spans: Vec<(u32, Span)> = Vec::new();
        for (replicas, totals_index) in (0_u32..).zip(&task.totals_index) {
            match (*totals_index, spans.last_mut()) {
                (Some(totals_index), Some((last, span))) if *last == totals_index => span.1 = replicas,
                (Some(totals_index), _) => spans.push((totals_index, (replicas, replicas))),
                (None, _) => {}
            }
        }
        let spans: Vec<Span> = spans.into_iter().map(|(_, span)| span).collect();
        Self {
            nodes: cluster.nodes.len() as u32,
            widest: cluster.nodes.iter().map(|node| node.devices).max().unwrap_or(1),
            cluster,
            whole,
            groups: joined(&spans, tables::MAX_REPLICA_RANGES),
            spans,
            nearest: OnceLock::new(),
        }
    }

    /// Returns whether a stage may be on one node.
    pub(crate) fn fits_one(&self, stage: Span) -> bool {
        stage.0 <= self.widest
    }

    /// Returns the spread stages with this range of devices.
    pub(crate) fn spreads(&self, devices: Span) -> Vec<Spread> {
        if self.nodes == 1 || devices.1 <= if self.whole { self.widest } else { 1 } {
            return Vec::new();
        }
        if self.whole {
            return vec![Spread { devices, nodes: (2, self.nodes) }];
        }
        // Ranges grow by the smallest factor with which `NODE_RANGES` of them cover all nodes.
        let factor = (2..self.nodes).find(|factor| factor.pow(tables::NODE_RANGES) >= self.nodes).unwrap_or(2);
        let mut spreads = Vec::new();
        let all = self.nodes.min(devices.1);
        let needed = devices.0.div_ceil(self.widest).max(2);
        let mut min_nodes = 2;
        while min_nodes <= all {
            let mut max_nodes = (min_nodes - 1).saturating_mul(factor).min(all);
            if max_nodes >= needed {
                let nodes = min_nodes.max(needed);
                // Where the all-reduce hardly depends on the number of nodes, one range for all others loses little.
                if self.has_similar_all_reduce(devices.0, nodes, all) {
                    max_nodes = all;
                }
                spreads.push(Spread { devices, nodes: (nodes, max_nodes) });
            }
            min_nodes = max_nodes + 1;
        }
        spreads
    }

    /// Returns whether the all-reduce of `devices` takes about as long on `few` nodes as on `many`.
    fn has_similar_all_reduce(&self, devices: u32, few: u32, many: u32) -> bool {
        let [few, many] = [few, many].map(|nodes| self.cluster.all_reduce(nodes, devices.div_ceil(nodes)));
        let alike = |one: f64, other: f64| (one - other).abs() <= tables::SAME_ALL_REDUCE * one.max(other);
        alike(few.s_per_byte, many.s_per_byte) && alike(few.latency_s, many.latency_s)
    }

    /// Returns the transfer between two stages on the same node.
    pub(crate) fn beside(&self, one: Span, other: Span) -> Rate {
        // The smaller stage has at most half of the node, and its devices' own ports carry all bytes.
        let max_devices = one.1.min(other.1).min(self.widest / 2).max(1);
        let Link { bytes_per_s, latency_s, .. } = self.cluster.intra;
        Rate { s_per_byte: 1.0 / (f64::from(max_devices) * bytes_per_s), latency_s }
    }

    /// Returns the transfer between two stages on one node each, which is not the same node.
    pub(crate) fn apart(&self) -> Rate {
        self.across(1.0)
    }

    /// Returns the transfer between a stage on one node and a spread one.
    pub(crate) fn one_and_spread(&self, one: Span, spread: Spread) -> Rate {
        if self.whole {
            return self.across(1.0);
        }
        // The first node has at most min(B - m + 1, left) devices of the spread stage. Their fraction of B is largest
        // where both terms are equal.
        let (left, elsewhere) = (self.widest.saturating_sub(one.0), spread.nodes.0 - 1);
        let min_devices = spread.devices.0.max(spread.nodes.0);
        let max_devices = (left + elsewhere).clamp(min_devices, spread.devices.1.max(min_devices));
        self.across(1.0 - f64::from(left.min(max_devices - elsewhere)) / f64::from(max_devices))
    }

    /// Returns the transfer between two spread stages.
    pub(crate) fn both_spread(&self, one: Spread, other: Spread) -> Rate {
        if self.whole {
            let nodes = one.devices.1.min(other.devices.1).div_ceil(self.widest);
            return self.across(1.0 / f64::from(nodes));
        }
        let [own, others] = [one, other].map(|stage| self.fractions(stage.devices));
        self.across(SpreadPair::new(self, &own, &others).passing(one.nodes, other.nodes))
    }

    /// Returns the shortest transfer between a stage on one node and any spread stage. Returns `None` if no stage can
    /// be spread.
    pub(crate) fn one_and_any_spread(&self, one: Span) -> Option<Rate> {
        let spread = self.groups.iter().flat_map(|&span| self.spreads(span));
        spread.map(|other| self.one_and_spread(one, other)).reduce(min_rate)
    }

    /// Returns the shortest transfer between a spread stage and any other spread stage. Returns `None` if there is
    /// none.
    pub(crate) fn any_spread(&self, one: Spread) -> Option<Rate> {
        let nearest = self.nearest.get_or_init(|| self.all_nearest());
        let meets = |a: Span, b: Span| a.0 <= b.1 && b.0 <= a.1;
        (nearest.iter())
            .filter(|(known, _)| meets(known.devices, one.devices) && meets(known.nodes, one.nodes))
            .map(|&(_, rate)| rate)
            .reduce(min_rate)
    }

    /// Returns the shortest transfer to a stage from any stage in front. `free_on_node` devices are left on its node at
    /// most; `None` if the stage is spread.
    pub(crate) fn to_stage(&self, stage: Span, free_on_node: Option<u32>) -> Rate {
        let all = (1, self.spans.last().map_or(1, |span| span.1));
        // A transfer takes as long in either direction, so it does not matter which stage is in front.
        let rates = match free_on_node {
            None => (self.spreads(stage).into_iter())
                .flat_map(|own| [Some(self.one_and_spread(all, own)), self.any_spread(own)])
                .flatten()
                .collect(),
            Some(free) => {
                let beside = (free > 0).then(|| self.beside(stage, (1, free)));
                let apart = (self.nodes > 1).then(|| self.apart());
                [beside, apart, self.one_and_any_spread(stage)].into_iter().flatten().collect::<Vec<Rate>>()
            }
        };
        rates.into_iter().reduce(min_rate).unwrap_or_default()
    }

    /// Returns every spread stage with the shortest transfer to any other spread stage.
    fn all_nearest(&self) -> Vec<(Spread, Rate)> {
        let mut all: Vec<(Spread, Option<Rate>)> = Vec::new();
        let mut groups: Vec<(Fractions, Range<usize>)> = Vec::new();
        for &span in &self.groups {
            let first = all.len();
            all.extend(self.spreads(span).into_iter().map(|spread| (spread, None)));
            groups.push((self.fractions(span), first..all.len()));
        }
        for (at, (own, own_range)) in groups.iter().enumerate() {
            for (others, other_range) in &groups[..=at] {
                // A transfer is the same in both directions, so half of the pairs suffice.
                let mut pair = SpreadPair::new(self, own, others);
                for one in own_range.clone() {
                    for other in other_range.clone().filter(|&other| other <= one) {
                        let rate = if self.whole {
                            self.both_spread(all[one].0, all[other].0)
                        } else {
                            self.across(pair.passing(all[one].0.nodes, all[other].0.nodes))
                        };
                        for end in [one, other] {
                            all[end].1 = Some(all[end].1.map_or(rate, |known| min_rate(known, rate)));
                        }
                    }
                }
            }
        }
        all.into_iter().filter_map(|(spread, rate)| rate.map(|rate| (spread, rate))).collect()
    }

    /// Returns the fractions of a spread stage, for each number of its devices that one node may have.
    fn fractions(&self, stage: Span) -> Fractions {
        (0..stage.1.min(self.widest + 1)).map(|devices| fraction(devices, stage)).collect()
    }

    /// Returns the all-reduce rate of a stage on one node.
    pub(crate) fn all_reduce_in_one(&self, stage: Span) -> Rate {
        if stage.1 > 1 { self.cluster.all_reduce(1, stage.0) } else { Rate::default() }
    }

    /// Returns the all-reduce rate of a spread stage. Rate and latency are each the smallest over its node counts.
    pub(crate) fn all_reduce_spread(&self, spread: Spread) -> Rate {
        let (min_devices, all) = (spread.devices.0.max(2), spread.nodes);
        if self.whole {
            return self.cluster.all_reduce(min_devices.div_ceil(self.widest).max(2), self.widest);
        }
        // No stage is on more nodes than it has devices.
        let needed = all.0.max(min_devices.div_ceil(self.widest));
        (needed..=all.1.min(min_devices).max(needed))
            .map(|nodes| self.cluster.all_reduce(nodes, min_devices.div_ceil(nodes)))
            .reduce(min_rate)
            .unwrap_or_default()
    }

    /// Returns the transfer of this fraction of the bytes through the port of one node.
    fn across(&self, fraction: f64) -> Rate {
        let Link { bytes_per_s, latency_s, .. } = self.cluster.inter;
        Rate { s_per_byte: fraction / bytes_per_s, latency_s }
    }
}

/// Two spread stages on any numbers of nodes. Computes the bytes that pass ports once for each condition.
struct SpreadPair<'p> {
    widest: u32,
    nodes: u32,
    /// Fractions of each stage by its devices on one node.
    fractions: [&'p [(f64, f64)]; 2],
    /// Conditions that were asked for: some node has at least this mean. Each comes with the smallest fraction of the
    /// bytes that passes the port of such a node.
    known: Vec<((Mean, u32), f64)>,
}

/// Quantity of which some node has at least the mean over all nodes: the fraction of one stage, or the sum of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mean {
    Both,
    One,
    Other,
}

impl<'p> SpreadPair<'p> {
    /// Returns a pair by the fractions of both stages.
    fn new(links: &Links, one: &'p [(f64, f64)], other: &'p [(f64, f64)]) -> Self {
        Self { widest: links.widest, nodes: links.nodes, fractions: [one, other], known: Vec::new() }
    }

    /// Returns the smallest fraction that passes the fullest port, with these numbers of nodes.
    fn passing(&mut self, one: Span, other: Span) -> f64 {
        // Some node has at least the mean of each quantity. These may be three nodes, of which the fullest counts.
        let both = self.nodes.min(one.1 + other.1);
        let each = [(Mean::Both, both), (Mean::One, one.1), (Mean::Other, other.1)].map(|mean| self.passing_with(mean));
        each[0].max(each[1]).max(each[2]).min(1.0)
    }

    /// Returns the smallest fraction that passes the port of a node with at least the mean of a quantity over a number
    /// of nodes.
    fn passing_with(&mut self, mean: (Mean, u32)) -> f64 {
        if let Some(&(_, passing)) = self.known.iter().find(|(known, _)| *known == mean) {
            return passing;
        }
        // The tolerance keeps rounding from excluding a node that has exactly the mean.
        let nodes = f64::from(mean.1);
        let passing = match mean.0 {
            Mean::Both => self.min_passing(|x, y| x + y >= 2.0 / nodes - 1e-9),
            Mean::One => self.min_passing(|x, _| x >= 1.0 / nodes - 1e-9),
            Mean::Other => self.min_passing(|_, y| y >= 1.0 / nodes - 1e-9),
        };
        self.known.push((mean, passing));
        passing
    }

    /// Returns the smallest fraction that passes the port of a node whose fractions of both stages meet `has`. A node
    /// with more devices must meet it as well.
    fn min_passing(&self, has: impl Fn(f64, f64) -> bool) -> f64 {
        let [one, other] = self.fractions;
        let mut passing: f64 = f64::INFINITY;
        for (here, &x) in (0_u32..).zip(one) {
            let max_there = (other.len() as u32 - 1).min(self.widest - here);
            let y = |there: u32| other[there as usize];
            let is_enough = |there: u32| has(x.1, y(there).1);
            if !is_enough(max_there) {
                continue;
            }
            let needed = first(0, max_there, is_enough);
            // With more receivers here, less is sent away and more is received. So the larger one is smallest where
            // both cross, at one of the two whole numbers beside it.
            let send = |there: u32| x.0 * (1.0 - y(there).1);
            let receive = |there: u32| y(there).0 * (1.0 - x.1);
            let crossing = first(needed, max_there, |there| receive(there) >= send(there));
            for there in [crossing.saturating_sub(1).max(needed), crossing] {
                passing = passing.min(send(there).max(receive(there)));
            }
        }
        passing
    }
}

/// Joins neighboring ranges of replica counts until at most `max` are left.
pub(crate) fn joined(spans: &[Span], max: usize) -> Vec<Span> {
    let mut groups: Vec<Span> = Vec::new();
    for max_ratio in tables::RANGE_RATIOS {
        groups.clear();
        for &span in spans {
            match groups.last_mut() {
                Some(group) if f64::from(span.1) <= max_ratio * f64::from(group.0) => group.1 = span.1,
                _ => groups.push(span),
            }
        }
        if groups.len() <= max {
            break;
        }
    }
    groups
}

/// Returns the smaller time per byte and the smaller latency, each by itself.
pub(crate) fn min_rate(one: Rate, other: Rate) -> Rate {
    Rate { s_per_byte: one.s_per_byte.min(other.s_per_byte), latency_s: one.latency_s.min(other.latency_s) }
}

/// Returns the smallest and the largest fraction of a spread stage that a number of its devices is.
fn fraction(devices: u32, stage: Span) -> (f64, f64) {
    let (devices, min_devices, max_devices) = (f64::from(devices), f64::from(stage.0), f64::from(stage.1));
    // A spread stage has a device on another node, so one node never has all of it.
    (devices / max_devices, (devices / min_devices).min((max_devices - 1.0) / max_devices))
}

/// Returns the first number of a range that is enough, by bisection. All that follow must be enough, too. Returns the
/// end of the range if none before it is.
pub(crate) fn first(mut low: u32, mut high: u32, is_enough: impl Fn(u32) -> bool) -> u32 {
    while low < high {
        let middle = low.midpoint(high);
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}
