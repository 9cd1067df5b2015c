//! Lemma *Links, wherever stages lie* (docs/proofs.md#links-wherever-stages-lie): the shortest transfers and gradient
//! all-reduces of neighbouring stages over all placements.
//!
//! A stage is *in one* node or *spread* over several. With `x` the part of the senders on a node and `y` that of the
//! receivers, `max(x (1 - y), y (1 - x))` of a cut's bytes pass the node's port ([`Cluster::transfer`]), and the fullest port
//! decides. If all devices of both stages share one node, nothing passes any port: the stages are *beside* each other.
//! Otherwise, with `k` nodes of at most `d` devices:
//!
//! - Two stages in one node each: all bytes pass.
//! - One stage of `A` devices in one node, one of `B` devices spread over `m` nodes: the first node has at most
//!   `min(B - m + 1, d - A)` receivers, and the bytes for all others pass.
//! - Both spread: `x + y` is at least `2 / k` on one node, `x` is at least `1 / m` on one, and `y` at least `1 / n` on one. Each
//!   of these nodes passes at least what the best numbers of devices `a + b <= d` with such parts pass.
//!
//! Replica counts come as ranges: those that give their devices the same share count as one. So do node counts: few nodes sum
//! gradients faster, and many of them share the traffic.

use crate::planner::effort::tables;
use crate::planner::hybrid::subproblem::Subproblem;
use std::ops::Range;
use std::sync::OnceLock;

use crate::cost::network::{Cluster, Link, Rate};

/// Range of devices of a stage: the fewest, the most.
pub(crate) type Span = (u32, u32);

/// A stage on several nodes, by its ranges of devices and of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spread {
    pub devices: Span,
    pub machines: Span,
}

/// For 0, 1, 2 … devices of a spread stage on one node, the smallest and the largest part of the stage that they are.
type Parts = Vec<(f64, f64)>;

/// Lower bounds on transfers and all-reduces of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    cluster: Cluster,
    pub machines: u32,
    /// Devices of the largest node.
    pub widest: u32,
    /// Whether stages are on one node, or on whole nodes if they do not fit on one.
    whole: bool,
    /// Ranges of replicas that give their devices the same share, fewest first.
    pub spans: Vec<Span>,
    /// The same replica counts in fewer ranges, which makes pairs of them fast to compare and their bounds lower.
    groups: Vec<Span>,
    /// For each spread stage, the shortest transfer to any other spread stage.
    nearest: OnceLock<Vec<(Spread, Rate)>>,
}

impl Links {
    /// Returns the bounds of a subproblem's cluster.
    pub(crate) fn new(task: &Subproblem<'_>, whole: bool) -> Self {
        let cluster = task.cluster.clone();
        let mut spans: Vec<(u32, Span)> = Vec::new();
        for (replicas, share) in (0_u32..).zip(&task.share) {
            match (*share, spans.last_mut()) {
                (Some(share), Some((last, span))) if *last == share => span.1 = replicas,
                (Some(share), _) => spans.push((share, (replicas, replicas))),
                (None, _) => {}
            }
        }
        let spans: Vec<Span> = spans.into_iter().map(|(_, span)| span).collect();
        Self {
            machines: cluster.machines.len() as u32,
            widest: cluster.machines.iter().map(|machine| machine.devices).max().unwrap_or(1),
            cluster,
            whole,
            groups: grouped(&spans),
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
        if self.machines == 1 || devices.1 <= if self.whole { self.widest } else { 1 } {
            return Vec::new();
        }
        if self.whole {
            return vec![Spread { devices, machines: (2, self.machines) }];
        }
        // Each range ends at a multiple of the one before, so that so many of them are enough.
        let factor = (2..self.machines).find(|factor| factor.pow(tables::NODE_RANGES) >= self.machines).unwrap_or(2);
        let mut spreads = Vec::new();
        let all = self.machines.min(devices.1);
        let enough = devices.0.div_ceil(self.widest).max(2);
        let mut fewest = 2;
        while fewest <= all {
            let mut most = (fewest - 1).saturating_mul(factor).min(all);
            if most >= enough {
                let machines = fewest.max(enough);
                if self.sums_alike(devices.0, machines, all) {
                    most = all;
                }
                spreads.push(Spread { devices, machines: (machines, most) });
            }
            fewest = most + 1;
        }
        spreads
    }

    /// Returns whether the all-reduce of `devices` takes about as long on `few` nodes as on `many`.
    fn sums_alike(&self, devices: u32, few: u32, many: u32) -> bool {
        let [few, many] = [few, many].map(|machines| self.cluster.all_reduce(machines, devices.div_ceil(machines)));
        let alike = |one: f64, other: f64| (one - other).abs() <= tables::SAME_ALL_REDUCE * one.max(other);
        alike(few.s_per_byte, many.s_per_byte) && alike(few.latency_s, many.latency_s)
    }

    /// Returns the transfer between two stages on the same node.
    pub(crate) fn beside(&self, one: Span, other: Span) -> Rate {
        let most = one.1.min(other.1).min(self.widest / 2).max(1);
        let Link { bytes_per_s, latency_s, .. } = self.cluster.intra;
        Rate { s_per_byte: 1.0 / (f64::from(most) * bytes_per_s), latency_s }
    }

    /// Returns the transfer between two stages on one node each, not the same.
    pub(crate) fn apart(&self) -> Rate {
        self.across(1.0)
    }

    /// Returns the transfer between a stage on one node and a spread one.
    pub(crate) fn one_and_spread(&self, one: Span, spread: Spread) -> Rate {
        if self.whole {
            return self.across(1.0);
        }
        // There are min(B - m + 1, left) of the spread stage at most; its part is the largest where both are equal.
        let (left, elsewhere) = (self.widest.saturating_sub(one.0), spread.machines.0 - 1);
        let fewest = spread.devices.0.max(spread.machines.0);
        let most = (left + elsewhere).clamp(fewest, spread.devices.1.max(fewest));
        self.across(1.0 - f64::from(left.min(most - elsewhere)) / f64::from(most))
    }

    /// Returns the transfer between two spread stages.
    pub(crate) fn both_spread(&self, one: Spread, other: Spread) -> Rate {
        if self.whole {
            let machines = one.devices.1.min(other.devices.1).div_ceil(self.widest);
            return self.across(1.0 / f64::from(machines));
        }
        let (ours, theirs) = (self.parts(one.devices), self.parts(other.devices));
        self.across(SpreadPair::new(self, &ours, &theirs).passing(one.machines, other.machines))
    }

    /// Returns the transfer between a stage on one node and any spread one, if there can be one.
    pub(crate) fn one_and_any_spread(&self, one: Span) -> Option<Rate> {
        let spread = self.groups.iter().flat_map(|&span| self.spreads(span));
        spread.map(|other| self.one_and_spread(one, other)).reduce(least)
    }

    /// Returns the transfer between a spread stage and any other one, if there can be one.
    pub(crate) fn any_spread(&self, one: Spread) -> Option<Rate> {
        let nearest = self.nearest.get_or_init(|| self.all_nearest());
        let meets = |a: Span, b: Span| a.0 <= b.1 && b.0 <= a.1;
        (nearest.iter())
            .filter(|(known, _)| meets(known.devices, one.devices) && meets(known.machines, one.machines))
            .map(|&(_, rate)| rate)
            .reduce(least)
    }

    /// For each way to spread a stage, the least to any other one that is spread.
    fn all_nearest(&self) -> Vec<(Spread, Rate)> {
        let mut all: Vec<(Spread, Option<Rate>)> = Vec::new();
        let mut groups: Vec<(Parts, Range<usize>)> = Vec::new();
        for &span in &self.groups {
            let first = all.len();
            all.extend(self.spreads(span).into_iter().map(|spread| (spread, None)));
            groups.push((self.parts(span), first..all.len()));
        }
        for (at, (own, ours)) in groups.iter().enumerate() {
            for (their, theirs) in &groups[..=at] {
                let mut pair = SpreadPair::new(self, own, their); // the same in both directions
                for one in ours.clone() {
                    for other in theirs.clone().filter(|&other| other <= one) {
                        let rate = if self.whole {
                            self.both_spread(all[one].0, all[other].0)
                        } else {
                            self.across(pair.passing(all[one].0.machines, all[other].0.machines))
                        };
                        for end in [one, other] {
                            all[end].1 = Some(all[end].1.map_or(rate, |known| least(known, rate)));
                        }
                    }
                }
            }
        }
        all.into_iter().filter_map(|(spread, rate)| rate.map(|rate| (spread, rate))).collect()
    }

    /// Returns the parts of a spread stage.
    fn parts(&self, stage: Span) -> Parts {
        (0..stage.1.min(self.widest + 1)).map(|devices| part(devices, stage)).collect()
    }

    /// Returns the all-reduce rate of a stage on one node.
    pub(crate) fn sum_in_one(&self, stage: Span) -> Rate {
        if stage.1 > 1 { self.cluster.all_reduce(1, stage.0) } else { Rate::default() }
    }

    /// Returns the all-reduce rate of a spread stage. Rate and latency are each the smallest over its node counts.
    pub(crate) fn sum_spread(&self, spread: Spread) -> Rate {
        let (fewest, all) = (spread.devices.0.max(2), spread.machines);
        if self.whole {
            return self.cluster.all_reduce(fewest.div_ceil(self.widest).max(2), self.widest);
        }
        // More machines than devices are like as many.
        let enough = all.0.max(fewest.div_ceil(self.widest));
        (enough..=all.1.min(fewest).max(enough))
            .map(|machines| self.cluster.all_reduce(machines, fewest.div_ceil(machines)))
            .reduce(least)
            .unwrap_or_default()
    }

    fn across(&self, part: f64) -> Rate {
        let Link { bytes_per_s, latency_s, .. } = self.cluster.inter;
        Rate { s_per_byte: part / bytes_per_s, latency_s }
    }
}

/// Two spread stages on any numbers of nodes, with the bytes that pass ports, computed once for each condition.
struct SpreadPair<'p> {
    widest: u32,
    machines: u32,
    /// Parts of each stage by its devices on one node.
    parts: [&'p [(f64, f64)]; 2],
    /// For each condition that some node meets, the smallest part that passes its port.
    known: Vec<((Part, u32), f64)>,
}

/// The stage, or both in sum, of which some node has at least the mean part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Both,
    One,
    Other,
}

impl<'p> SpreadPair<'p> {
    fn new(links: &Links, one: &'p [(f64, f64)], other: &'p [(f64, f64)]) -> Self {
        Self { widest: links.widest, machines: links.machines, parts: [one, other], known: Vec::new() }
    }

    /// Returns the smallest part that passes the fullest port, with these numbers of nodes.
    fn passing(&mut self, one: Span, other: Span) -> f64 {
        // Twice the mean of both parts that some machine has, or one part alone.
        let both = self.machines.min(one.1 + other.1);
        let each = [(Part::Both, both), (Part::One, one.1), (Part::Other, other.1)].map(|mean| self.with(mean));
        each[0].max(each[1]).max(each[2]).min(1.0)
    }

    /// Returns the smallest part that passes the port of a node that has at least the mean part over a number of nodes.
    fn with(&mut self, mean: (Part, u32)) -> f64 {
        if let Some(&(_, passing)) = self.known.iter().find(|(known, _)| *known == mean) {
            return passing;
        }
        let machines = f64::from(mean.1);
        let passing = match mean.0 {
            Part::Both => self.least(|x, y| x + y >= 2.0 / machines - 1e-9),
            Part::One => self.least(|x, _| x >= 1.0 / machines - 1e-9),
            Part::Other => self.least(|_, y| y >= 1.0 / machines - 1e-9),
        };
        self.known.push((mean, passing));
        passing
    }

    /// Returns the smallest part that passes the port of a node for whose parts of both stages `has` is true. More
    /// devices keep it true.
    fn least(&self, has: impl Fn(f64, f64) -> bool) -> f64 {
        let [one, other] = self.parts;
        let mut passing: f64 = f64::INFINITY;
        for (here, &x) in (0_u32..).zip(one) {
            let most = (other.len() as u32 - 1).min(self.widest - here);
            let y = |there: u32| other[there as usize];
            let is_enough = |there: u32| has(x.1, y(there).1);
            if !is_enough(most) {
                continue;
            }
            let enough = first(0, most, is_enough);
            // More receivers leave less to send away, and more to receive: the best is where these cross.
            let send = |there: u32| x.0 * (1.0 - y(there).1);
            let receive = |there: u32| y(there).0 * (1.0 - x.1);
            let crossing = first(enough, most, |there| receive(there) >= send(there));
            for there in [crossing.saturating_sub(1).max(enough), crossing] {
                passing = passing.min(send(there).max(receive(there)));
            }
        }
        passing
    }
}

/// Joins neighboring ranges until there are few enough.
fn grouped(spans: &[Span]) -> Vec<Span> {
    let mut groups: Vec<Span> = Vec::new();
    for apart in tables::RANGE_RATIOS {
        groups.clear();
        for &span in spans {
            match groups.last_mut() {
                Some(group) if f64::from(span.1) <= apart * f64::from(group.0) => group.1 = span.1,
                _ => groups.push(span),
            }
        }
        if groups.len() <= tables::MAX_REPLICA_RANGES {
            break;
        }
    }
    groups
}

/// Returns the smaller rate and the smaller latency.
pub(crate) fn least(one: Rate, other: Rate) -> Rate {
    Rate { s_per_byte: one.s_per_byte.min(other.s_per_byte), latency_s: one.latency_s.min(other.latency_s) }
}

/// Returns the smallest and the largest part of a spread stage that a number of its devices is.
fn part(devices: u32, stage: Span) -> (f64, f64) {
    let (devices, fewest, most) = (f64::from(devices), f64::from(stage.0), f64::from(stage.1));
    (devices / most, (devices / fewest).min((most - 1.0) / most))
}

/// Returns the first number of a range that is enough, as are all that follow. The end of the range if none is.
pub(crate) fn first(mut low: u32, mut high: u32, is_enough: impl Fn(u32) -> bool) -> u32 {
    while low < high {
        let middle = low.midpoint(high);
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}
