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
//! Numbers of replicas come as ranges: those that give their devices the same share count as one.

use crate::cost::network::{Cluster, Link, Rate};

/// Numbers of devices that a stage may have: the fewest, the most.
pub(super) type Span = (u32, u32);

/// What placements cost at least on a cluster.
#[derive(Debug, Clone)]
pub(super) struct Links {
    cluster: Cluster,
    pub machines: u32,
    /// Devices of the largest machine.
    pub widest: u32,
    /// Whether stages that don't fit in one machine take whole ones, and other stages lie in one.
    whole: bool,
}

impl Links {
    /// `whole` as the field says.
    pub(super) fn new(cluster: &Cluster, whole: bool) -> Self {
        let widest = cluster.machines.iter().map(|machine| machine.devices).max().unwrap_or(1);
        Self { cluster: cluster.clone(), machines: cluster.machines.len() as u32, widest, whole }
    }

    /// Whether a stage may lie in one machine.
    pub(super) fn fits_one(&self, stage: Span) -> bool {
        stage.0 <= self.widest
    }

    /// Whether a stage may be spread over several.
    pub(super) fn may_spread(&self, stage: Span) -> bool {
        self.machines > 1 && stage.1 > if self.whole { self.widest } else { 1 }
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
    pub(super) fn one_and_spread(&self, one: Span, spread: Span) -> Rate {
        if self.whole {
            return self.across(1.0);
        }
        let left = self.widest.saturating_sub(one.0);
        // The part of the spread stage that may be there too, min(B - 1, left) / B, is the largest where both are equal.
        let most = (left + 1).clamp(spread.0.max(2), spread.1.max(2));
        self.across(1.0 - f64::from(left.min(most - 1)) / f64::from(most))
    }

    /// Between two stages that are spread.
    pub(super) fn both_spread(&self, one: Span, other: Span) -> Rate {
        if self.whole {
            let machines = one.1.min(other.1).div_ceil(self.widest);
            return self.across(1.0 / f64::from(machines));
        }
        let least_mean = 1.0 / f64::from(self.machines);
        let mut passing: f64 = f64::INFINITY;
        for here in 0..one.1.min(self.widest + 1) {
            let x = part(here, one);
            let most = (other.1 - 1).min(self.widest - here);
            // Of the receivers, enough for the mean; rounding must not ask for one more.
            let enough = (f64::from(other.0) * (2.0 * least_mean - x.1) - 1e-9).ceil().max(0.0) as u32;
            if enough > most {
                continue;
            }
            // More receivers leave less to send away, and more to receive: the best is where these cross.
            let send = |there: u32| x.0 * (1.0 - part(there, other).1);
            let receive = |there: u32| part(there, other).0 * (1.0 - x.1);
            let (mut low, mut high) = (enough, most);
            while low < high {
                let middle = low.midpoint(high);
                if receive(middle) >= send(middle) { high = middle } else { low = middle + 1 }
            }
            for there in [low.saturating_sub(1).max(enough), low] {
                passing = passing.min(send(there).max(receive(there)));
            }
        }
        self.across(passing.min(1.0))
    }

    /// Summing gradients over a stage in one machine.
    pub(super) fn sum_in_one(&self, stage: Span) -> Rate {
        if stage.1 > 1 { self.cluster.all_reduce(1, stage.0) } else { Rate::default() }
    }

    /// Summing gradients over a stage that is spread: rate and latency are each the least of all ways to spread it.
    pub(super) fn sum_spread(&self, stage: Span) -> Rate {
        if self.whole {
            return self.cluster.all_reduce(stage.0.div_ceil(self.widest).max(2), self.widest);
        }
        let fewest = stage.0.max(2);
        (2..=self.machines.min(fewest))
            .map(|machines| (machines, fewest.div_ceil(machines)))
            .filter(|&(_, widest)| widest <= self.widest)
            .map(|(machines, widest)| self.cluster.all_reduce(machines, widest))
            .reduce(least)
            .unwrap_or_else(|| self.cluster.all_reduce(2, 1))
    }

    fn across(&self, part: f64) -> Rate {
        let Link { bytes_per_s, latency_s, .. } = self.cluster.inter;
        Rate { s_per_byte: part / bytes_per_s, latency_s }
    }
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
