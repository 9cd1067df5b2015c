//! The stages and hops within a time limit, and what each adds to the value of a plan.

use super::cost::{Costs, Step};
use super::problem::Objective;

/// The stages and hops that are feasible at one limit.
pub(super) struct FeasibleEdges<'a> {
    pub(super) costs: &'a Costs<'a>,
    pub(super) objective: Objective,
    pub(super) limit_s: f64,
    /// The last position that each host set may reach from each position, without buffers to send:
    /// `[host_set][position]`. Empty if positions are not all nested.
    furthest: Vec<Vec<u32>>,
    /// Whether every hop over a position is feasible and adds nothing to the value, also between two hosts of one type.
    open: Vec<bool>,
}

impl<'a> FeasibleEdges<'a> {
    pub(super) fn new(costs: &'a Costs<'a>, objective: Objective, limit_s: f64) -> Self {
        let furthest = (0..costs.host_sets.len())
            .map(|host_set| {
                let mut end = 0;
                let row = if costs.is_row() { costs.last } else { 0 };
                // The end never moves back when the begin moves on, so one pass over the layers finds all ends.
                (0..row)
                    .map(|first| {
                        end = end.max(first);
                        while end < costs.last
                            && costs.interval_s(host_set, first, end + 1) <= limit_s
                            && costs.may_run(host_set, first, end + 1)
                        {
                            end += 1;
                        }
                        let end = end.min(costs.furthest_by_memory(host_set, first));
                        u32::try_from(end).expect("layers are checked to be at most a million")
                    })
                    .collect()
            })
            .collect();
        let open = costs
            .slowest_s
            .iter()
            .map(|&slowest_s| slowest_s <= if objective == Objective::Latency { 0.0 } else { limit_s })
            .collect();
        Self { costs, objective, limit_s, furthest, open }
    }

    /// Returns whether every hop over `position` is feasible and adds nothing to the value.
    pub(super) fn is_open(&self, position: usize) -> bool {
        self.open[position]
    }

    /// Returns what the stage adds to the value of a plan.
    pub(super) fn stage_value(&self, host_set: usize, first: usize, end: usize) -> f64 {
        match self.objective {
            Objective::Throughput | Objective::Bits => 0.0,
            Objective::Latency => self.costs.compute_s(host_set, first, end),
            Objective::Hosts => self.costs.host_sets[host_set].replicas as f64,
        }
    }

    /// Returns what the hop adds to the value of a plan, or `None` if it exceeds the limit.
    pub(super) fn hop_value(&self, position: usize, from: Option<usize>, to: Option<usize>) -> Option<f64> {
        // Over an open position no hop needs a look-up of its link.
        if from.is_some() && self.open[position] {
            return Some(0.0);
        }
        let bits = self.costs.bits_within(position, from, to, self.limit_s)?;
        Some(match self.objective {
            Objective::Throughput | Objective::Hosts => 0.0,
            Objective::Latency => self.costs.hop_s(position, from, to, bits),
            Objective::Bits => f64::from(self.costs.chain.bits[0] - bits),
        })
    }

    /// Returns whether arriving at `position` is at least as good as arriving at any earlier position with the same
    /// hosts left.
    ///
    /// Any continuation from an earlier position can be shortened to start here: its first stage loses layers and needs
    /// no more memory (the position is light), and the hop into it is feasible and free (the position is open).
    pub(super) fn is_best_so_far(&self, position: usize) -> bool {
        // For latency, the hop into a later position may take longer, so a later arrival is not always better.
        self.costs.is_row() && self.objective != Objective::Latency && self.open[position] && self.costs.light[position]
    }

    /// Returns the ends worth considering for a stage of host set `host_set` from `first`, furthest first.
    ///
    /// The sequence stops behind the first end that is at least as good as all earlier positions.
    pub(super) fn ends(&self, host_set: usize, first: usize) -> impl Iterator<Item = usize> {
        let mut done = false;
        let furthest = self.furthest[host_set].get(first).map_or(first, |&end| end as usize);
        let later = self.costs.later(first).iter().rev().map(|&end| end as usize);
        let passable = move |&end: &usize| {
            self.costs.interval_s(host_set, first, end) <= self.limit_s && self.costs.may_run(host_set, first, end)
        };
        (first + 1..=furthest)
            .rev()
            .chain(later.filter(passable))
            .filter(move |&end| self.costs.fits(host_set, first, end))
            .take_while(move |&end| {
                // The dominating end itself is still taken, but nothing before it.
                let take = !done;
                done |= self.is_best_so_far(end);
                take
            })
    }

    /// Returns the value of a whole path, or `None` if it is not feasible.
    pub(super) fn path_value(&self, path: &[Step]) -> Option<f64> {
        let mut from = None;
        let mut value = 0.0;
        for &Step { host_set, first, end } in path {
            value += self.hop_value(first, from, Some(host_set))? + self.stage_value(host_set, first, end);
            from = Some(host_set);
        }
        Some(value + self.hop_value(self.costs.last, from, None)?)
    }
}
