//! The least that links take between neighbouring stages, wherever their devices are.
//!
//! A stage lies *in one* machine or is *spread* over several. With `x` the part of the senders on a machine and `y` that
//! of the receivers, `max(x (1 - y), y (1 - x))` of a cut's bytes pass the machine's port ([`Cluster::transfer`]), and
//! the fullest port decides. If all devices of both stages share one machine, nothing passes any port: the stages are
//! *beside* each other. Else, with machines of at most `d` devices, `k` of them:
//!
//! - Two stages in one machine each: all bytes pass, 1.
//! - A sender's machine that has all `A` senders has room for `d - A` receivers; it has not all of them, so the part
//!   that passes is at least `1 - min(B - 1, d - A) / B`.
//! - Both spread: `(x + y) / 2` sums to 1 over the machines, so it is at least `1 / k` on one of them. That machine has
//!   some number `a < A` of senders and `b < B` of receivers, `a + b <= d`, and its port takes the least of all such.
//!
//! - Likewise, a stage on `m` machines has at least `1 / m` of its devices on one of them.
//!
//! Numbers of replicas come as ranges: those that give their devices the same share count as one. So do numbers of
//! machines that a stage is spread over: few of them sum gradients faster, many of them share the traffic.

use std::sync::OnceLock;

use super::task::Task;
use crate::cost::network::{Cluster, Link, Rate};

/// Numbers of devices that a stage may have: the fewest, the most.
pub(super) type Span = (u32, u32);

/// A stage that lies on several machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Spread {
    pub devices: Span,
    pub machines: Span,
}

/// Ranges of numbers of machines that are told apart at most.
const MOST_RANGES: u32 = 4;
/// More machines make no difference where they sum gradients within this part of the time.
const ALIKE: f64 = 0.01;
/// Spans that are held against each other at most, and how far apart their ends may be for that, as a factor.
const MOST_GROUPS: usize = 64;
const APART: [f64; 6] = [1.0, 1.03, 1.07, 1.15, 1.3, 1.6];

/// What placements cost at least on a cluster.
#[derive(Debug, Clone)]
pub(super) struct Links {
    cluster: Cluster,
    pub machines: u32,
    /// Devices of the largest machine.
    pub widest: u32,
    /// Whether stages that don't fit in one machine take whole ones, and other stages lie in one.
    whole: bool,
    /// Numbers of replicas that give their devices the same share, fewest first.
    pub spans: Vec<Span>,
    /// The same numbers in fewer spans, where those are many: then what is least is less, and soon found.
    groups: Vec<Span>,
    /// For each way to spread a stage, the least to any other one that is spread.
    nearest: OnceLock<Vec<(Spread, Rate)>>,
}

impl Links {
    /// `whole` as the field says.
    pub(super) fn new(task: &Task<'_>, whole: bool) -> Self {
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

    /// Whether a stage may lie in one machine.
    pub(super) fn fits_one(&self, stage: Span) -> bool {
        stage.0 <= self.widest
    }

    /// The ways to spread a stage over several machines.
    pub(super) fn spreads(&self, devices: Span) -> Vec<Spread> {
        if self.machines == 1 || devices.1 <= if self.whole { self.widest } else { 1 } {
            return Vec::new();
        }
        if self.whole {
            return vec![Spread { devices, machines: (2, self.machines) }];
        }
        // Each range ends at a multiple of the one before, so that so many of them are enough.
        let factor = (2..self.machines).find(|factor| factor.pow(MOST_RANGES) >= self.machines).unwrap_or(2);
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

    /// Whether so many devices take about as long to sum gradients on few machines as on many.
    fn sums_alike(&self, devices: u32, few: u32, many: u32) -> bool {
        let [few, many] = [few, many].map(|machines| self.cluster.all_reduce(machines, devices.div_ceil(machines)));
        let alike = |one: f64, other: f64| (one - other).abs() <= ALIKE * one.max(other);
        alike(few.s_per_byte, many.s_per_byte) && alike(few.latency_s, many.latency_s)
    }

    /// Between two stages in the same machine.
    pub(super) fn beside(&self, one: Span, other: Span) -> Rate {
        let most = one.1.min(other.1).min(self.widest / 2).max(1);
        let Link { bytes_per_s, latency_s, .. } = self.cluster.intra;
        Rate { s_per_byte: 1.0 / (f64::from(most) * bytes_per_s), latency_s }
    }

    /// Between two stages in one machine each, not the same.
    pub(super) fn apart(&self) -> Rate {
        self.across(1.0)
    }

    /// Between a stage in one machine and one that is spread.
    pub(super) fn one_and_spread(&self, one: Span, spread: Spread) -> Rate {
        if self.whole {
            return self.across(1.0);
        }
        // There are min(B - m + 1, left) of the spread stage at most; its part is the largest where both are equal.
        let (left, elsewhere) = (self.widest.saturating_sub(one.0), spread.machines.0 - 1);
        let fewest = spread.devices.0.max(spread.machines.0);
        let most = (left + elsewhere).clamp(fewest, spread.devices.1.max(fewest));
        self.across(1.0 - f64::from(left.min(most - elsewhere)) / f64::from(most))
    }

    /// Between two stages that are spread.
    pub(super) fn both_spread(&self, one: Spread, other: Spread) -> Rate {
        if self.whole {
            let machines = one.devices.1.min(other.devices.1).div_ceil(self.widest);
            return self.across(1.0 / f64::from(machines));
        }
        let machines = self.machines.min(one.machines.1 + other.machines.1);
        // Twice the mean of both parts that some machine has, or one part alone.
        let passing = self
            .passing(one.devices, other.devices, |x, y| x + y >= 2.0 / f64::from(machines) - 1e-9)
            .max(self.passing(one.devices, other.devices, |x, _| x >= 1.0 / f64::from(one.machines.1) - 1e-9))
            .max(self.passing(one.devices, other.devices, |_, y| y >= 1.0 / f64::from(other.machines.1) - 1e-9));
        self.across(passing.min(1.0))
    }

    /// Between a stage in one machine and any that is spread, if one may be.
    pub(super) fn one_and_any_spread(&self, one: Span) -> Option<Rate> {
        let spread = self.groups.iter().flat_map(|&span| self.spreads(span));
        spread.map(|other| self.one_and_spread(one, other)).reduce(least)
    }

    /// Between a stage that is spread, with one of several numbers of replicas, and any other that is.
    pub(super) fn any_spread(&self, one: Spread) -> Option<Rate> {
        let nearest = self.nearest.get_or_init(|| {
            let all: Vec<Spread> = self.groups.iter().flat_map(|&span| self.spreads(span)).collect();
            let mut nearest: Vec<Option<Rate>> = vec![None; all.len()];
            for (at, &one) in all.iter().enumerate() {
                for (beside, &other) in all[..=at].iter().enumerate() {
                    let rate = self.both_spread(one, other); // the same in both directions
                    for end in [at, beside] {
                        nearest[end] = Some(nearest[end].map_or(rate, |known| least(known, rate)));
                    }
                }
            }
            all.into_iter().zip(nearest).filter_map(|(one, rate)| rate.map(|rate| (one, rate))).collect()
        });
        let meets = |a: Span, b: Span| a.0 <= b.1 && b.0 <= a.1;
        (nearest.iter())
            .filter(|(known, _)| meets(known.devices, one.devices) && meets(known.machines, one.machines))
            .map(|&(_, rate)| rate)
            .reduce(least)
    }

    /// The least that passes the port of a machine with so much of both stages, as parts of them, that `has` holds,
    /// which more devices never end.
    fn passing(&self, one: Span, other: Span, has: impl Fn(f64, f64) -> bool) -> f64 {
        let mut passing: f64 = f64::INFINITY;
        for here in 0..one.1.min(self.widest + 1) {
            let x = part(here, one);
            let most = (other.1 - 1).min(self.widest - here);
            let is_enough = |there: u32| has(x.1, part(there, other).1);
            if !is_enough(most) {
                continue;
            }
            let enough = first(0, most, is_enough);
            // More receivers leave less to send away, and more to receive: the best is where these cross.
            let send = |there: u32| x.0 * (1.0 - part(there, other).1);
            let receive = |there: u32| part(there, other).0 * (1.0 - x.1);
            let crossing = first(enough, most, |there| receive(there) >= send(there));
            for there in [crossing.saturating_sub(1).max(enough), crossing] {
                passing = passing.min(send(there).max(receive(there)));
            }
        }
        passing
    }

    /// Summing gradients over a stage in one machine.
    pub(super) fn sum_in_one(&self, stage: Span) -> Rate {
        if stage.1 > 1 { self.cluster.all_reduce(1, stage.0) } else { Rate::default() }
    }

    /// Summing gradients over a stage that is spread: rate and latency are each the least of all ways to spread it.
    pub(super) fn sum_spread(&self, spread: Spread) -> Rate {
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

/// Neighbouring spans joined, no farther than it takes to have few.
fn grouped(spans: &[Span]) -> Vec<Span> {
    let mut groups: Vec<Span> = Vec::new();
    for apart in APART {
        groups.clear();
        for &span in spans {
            match groups.last_mut() {
                Some(group) if f64::from(span.1) <= apart * f64::from(group.0) => group.1 = span.1,
                _ => groups.push(span),
            }
        }
        if groups.len() <= MOST_GROUPS {
            break;
        }
    }
    groups
}

/// The lesser of each.
pub(super) fn least(one: Rate, other: Rate) -> Rate {
    Rate { s_per_byte: one.s_per_byte.min(other.s_per_byte), latency_s: one.latency_s.min(other.latency_s) }
}

/// What part of a spread stage so many of its devices are, at least and at most.
fn part(devices: u32, stage: Span) -> (f64, f64) {
    let (devices, fewest, most) = (f64::from(devices), f64::from(stage.0), f64::from(stage.1));
    (devices / most, (devices / fewest).min((most - 1.0) / most))
}

/// The first number of a range that is enough, or the last one.
fn first(mut low: u32, mut high: u32, is_enough: impl Fn(u32) -> bool) -> u32 {
    while low < high {
        let middle = low.midpoint(high);
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}
