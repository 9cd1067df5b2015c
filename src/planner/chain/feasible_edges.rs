//! The stages and hops that keep within a time limit, and what each adds to the value of a plan.

use super::cost::{Costs, Step};
use super::problem::Objective;

/// What is passable at one limit.
pub(super) struct FeasibleEdges<'a> {
    pub(super) costs: &'a Costs<'a>,
    pub(super) objective: Objective,
    pub(super) limit_s: f64,
    /// The last position that each crew may reach from each position, buffers to send aside: `[crew][position]`. Empty
    /// where positions are not in a row.
    furthest: Vec<Vec<u32>>,
    /// Every hop over this position is passable and adds nothing (between two hosts of a type that has one, too).
    open: Vec<bool>,
}

impl<'a> FeasibleEdges<'a> {
    pub(super) fn new(costs: &'a Costs<'a>, objective: Objective, limit_s: f64) -> Self {
        let furthest = (0..costs.crews.len())
            .map(|crew| {
                let mut end = 0;
                let row = if costs.is_row() { costs.last } else { 0 };
                (0..row)
                    .map(|first| {
                        end = end.max(first);
                        while end < costs.last
                            && costs.interval_s(crew, first, end + 1) <= limit_s
                            && costs.may_run(crew, first, end + 1)
                        {
                            end += 1;
                        }
                        let end = end.min(costs.furthest_by_memory(crew, first));
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

    /// Whether every hop over `position` is passable and free.
    pub(super) fn is_open(&self, position: usize) -> bool {
        self.open[position]
    }

    /// What the stage adds to the value of a plan.
    pub(super) fn stage_value(&self, crew: usize, first: usize, end: usize) -> f64 {
        match self.objective {
            Objective::Throughput | Objective::Bits => 0.0,
            Objective::Latency => self.costs.compute_s(crew, first, end),
            Objective::Hosts => self.costs.crews[crew].replicas as f64,
        }
    }

    /// What the hop adds to the value of a plan; `None` where it does not keep within the limit.
    pub(super) fn hop_value(&self, position: usize, from: Option<usize>, to: Option<usize>) -> Option<f64> {
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

    /// Arriving at `position` is at least as good as arriving anywhere before it with the same hosts left.
    ///
    /// Whatever follows the earlier arrival can be cut short so as to start here: the first stage loses layers, needs
    /// no more memory (the position is light), and the hop into it is passable and free (the position is open).
    pub(super) fn is_best_so_far(&self, position: usize) -> bool {
        self.costs.is_row() && self.objective != Objective::Latency && self.open[position] && self.costs.light[position]
    }

    /// Ends worth considering for a stage of `crew` from `first`, furthest first.
    ///
    /// Stops behind the first end that is at least as good as all before it.
    pub(super) fn ends(&self, crew: usize, first: usize) -> impl Iterator<Item = usize> {
        let mut done = false;
        let furthest = self.furthest[crew].get(first).map_or(first, |&end| end as usize);
        let later = self.costs.later(first).iter().rev().map(|&end| end as usize);
        let passable = move |&end: &usize| {
            self.costs.interval_s(crew, first, end) <= self.limit_s && self.costs.may_run(crew, first, end)
        };
        (first + 1..=furthest)
            .rev()
            .chain(later.filter(passable))
            .filter(move |&end| self.costs.fits(crew, first, end))
            .take_while(move |&end| {
                let take = !done;
                done |= self.is_best_so_far(end);
                take
            })
    }

    /// Value of a whole path; `None` where it is not passable.
    pub(super) fn path_value(&self, path: &[Step]) -> Option<f64> {
        let mut from = None;
        let mut value = 0.0;
        for &Step { crew, first, end } in path {
            value += self.hop_value(first, from, Some(crew))? + self.stage_value(crew, first, end);
            from = Some(crew);
        }
        Some(value + self.hop_value(self.costs.last, from, None)?)
    }
}
