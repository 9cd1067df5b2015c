//! Conditions 3 and 4 of lemma *Memory* (docs/proofs.md): stages in a row, each on devices that have memory for it, cost no
//! more than all devices do, under any prices of devices. Condition 3 has stages between the cuts of a model, condition 4
//! between slices of all cuts.

use super::slices::Slices;
use super::{Conditions, ROUNDING, Row};
use crate::control::Control;
use crate::cost::nesting::Descending;
use crate::cost::{self, LayerSums, Totals};
use crate::planner::effort::bounds;
use crate::planner::hybrid::subproblem::Subproblem;

/// Where stages in a row may end: at the cuts of a model, or in slices of all its cuts.
pub(super) enum Ends<'a> {
    Cuts(&'a LayerSums),
    Slices(Slices),
}

impl Ends<'_> {
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Cuts(model) => model.cuts(),
            Self::Slices(slices) => slices.count(),
        }
    }

    /// Returns how many stages there are to choose from.
    pub(super) fn pairs(&self) -> usize {
        match self {
            Self::Cuts(model) => model.pairs(),
            Self::Slices(slices) => slices.count() * (slices.count() - 1) / 2,
        }
    }

    /// Returns whether a stage that begins earlier holds no less.
    pub(super) fn is_nested(&self) -> bool {
        match self {
            Self::Cuts(model) => model.is_chain,
            Self::Slices(_) => true,
        }
    }

    pub(super) fn begins(&self, end: usize) -> Descending<'_> {
        match self {
            Self::Cuts(model) => model.begins(end),
            Self::Slices(_) => Descending::Range((0..end as u32).rev()),
        }
    }

    /// Returns for each end what all layers below it hold at least and at most, with so many bytes for each byte of weights
    /// and for each one that is saved.
    pub(super) fn held_bytes(&self, of_weight: f64, of_saved: f64, totals: &Totals) -> (Vec<f64>, Vec<f64>) {
        match self {
            Self::Cuts(model) => {
                let below = model.parameter_bytes.iter().zip(&totals.saved_bytes);
                let held: Vec<f64> = below.map(|(weights, saved)| of_weight * weights + of_saved * saved).collect();
                (held.clone(), held)
            }
            Self::Slices(slices) => slices.held_bytes(of_weight, of_saved, totals),
        }
    }
}

/// Stages with so many micro-batches in flight.
pub(super) struct Level<'a> {
    pub(super) ends: &'a Ends<'a>,
    pub(super) in_flight: u32,
    /// For each split, what all layers below each end hold at least and at most.
    pub(super) held_bytes: Vec<(Vec<f64>, Vec<f64>)>,
    /// What all layers below each end hold at least on all devices together, in stages of this level or further in front.
    pub(super) front_bytes: Vec<f64>,
}

/// What devices cost, the larger ones no less than the smaller.
struct Price {
    /// For each capacity and each split, the cheapest devices for a stage that needs devices of at least that capacity.
    pub(super) of_stage: Vec<Vec<f64>>,
    /// All devices, and some more for rounding.
    pub(super) of_all: f64,
    /// The least for a byte of a device.
    pub(super) of_byte: f64,
}

impl Conditions<'_> {
    /// Returns the prices of devices under which stages in a row are summed.
    fn prices(&self) -> Vec<Price> {
        let classes = self.capacities.len();
        let above = |class: usize| self.capacities.get(class).map_or(0, |&(_, devices)| devices);
        let counts: Vec<u32> = (0..classes).map(|class| above(class) - above(class + 1)).collect();
        let mut each: Vec<Vec<f64>> = vec![vec![1.0; classes]];
        if classes > 1 {
            each.push(self.capacities.iter().map(|&(capacity_bytes, _)| capacity_bytes.max(0.0)).collect());
            let steps = (bounds::MAX_PRICES / (classes - 1)).max(1);
            for first_large in (1..classes).take(bounds::MAX_PRICES) {
                for step in 0..steps {
                    let small = step as f64 / steps as f64;
                    each.push((0..classes).map(|class| if class < first_large { small } else { 1.0 }).collect());
                }
            }
        }
        let price = |of_class: Vec<f64>| {
            let cheapest = |class: usize, replicas: u32| {
                let mut left = replicas;
                let mut sum = 0.0;
                for (&count, &price) in counts.iter().zip(&of_class).skip(class) {
                    let taken = left.min(count);
                    sum += f64::from(taken) * price;
                    left -= taken;
                }
                sum
            };
            let of_stage = (0..classes)
                .map(|class| self.splits.iter().map(|&(fewest, ..)| cheapest(class, fewest)).collect())
                .collect();
            let of_byte = (self.capacities.iter().zip(&of_class))
                .filter(|&(&(capacity_bytes, _), _)| capacity_bytes > 0.0)
                .map(|(&(capacity_bytes, _), &price)| price / capacity_bytes)
                .fold(f64::INFINITY, f64::min);
            let of_byte = if of_byte.is_finite() { of_byte } else { 0.0 };
            Price { of_stage, of_all: cheapest(0, self.capacities[0].1) * (1.0 + ROUNDING), of_byte }
        };
        each.into_iter().map(price).collect()
    }

    /// Returns whether stages can follow one another, each on devices that have the memory for it, until all devices are
    /// taken, at any price. Devices may be any, whatever other stages take.
    pub(super) fn row(&self, ends: &Ends<'_>, max_priced: usize, control: &Control) -> Row {
        let last = ends.count() - 1;
        if self.splits.is_empty() || ends.pairs() > max_priced {
            return if self.splits.is_empty() { Row::Fails } else { Row::Unknown };
        }
        let max_stages = (self.task.settings.max_stages as usize).min(last).min(self.capacities[0].1 as usize);
        let has_levels = self.in_flight(2) > self.in_flight(1);
        let levels = if has_levels { max_stages.min(self.task.micro_batches as usize) } else { 1 };
        let (prices, least) = (self.prices(), self.min_of_all_replicas());
        // For each end the least that the stages behind it take under each price by itself.
        let mut behind = vec![f64::INFINITY; (last + 1) * prices.len()];
        behind[last * prices.len()..].fill(0.0);
        let mut priced = 0;
        for from_end in 1..=levels {
            // The last level stands for all numbers of stages from there on.
            let is_last = from_end == levels || priced >= max_priced;
            let level = self.level(ends, from_end as u32, least);
            priced += ends.count() * self.splits.len() / 8; // sums that take about an eighth of the time
            let mut taken = vec![f64::INFINITY; behind.len()];
            for end in (1..=last).rev() {
                let mut rest = behind[end * prices.len()..][..prices.len()].to_vec();
                if is_last {
                    let of_level = &taken[end * prices.len()..];
                    rest.iter_mut().zip(of_level).for_each(|(rest, &of_level)| *rest = rest.min(of_level));
                }
                let front_bytes = level.front_bytes[end] * (1.0 - ROUNDING);
                let is_over = |(&rest, price): (&f64, &Price)| rest + front_bytes * price.of_byte > price.of_all;
                if rest.iter().zip(&prices).any(is_over) {
                    continue;
                }
                if control.should_stop() {
                    return Row::Unknown;
                }
                priced += self.put_stages_before(end, &level, &prices, &rest, &mut taken);
            }
            let fits = |taken: &[f64]| taken.iter().zip(&prices).all(|(&taken, price)| taken <= price.of_all);
            if fits(&taken[..prices.len()]) {
                return if is_last && from_end < levels { Row::Unknown } else { Row::Fits };
            }
            if is_last || !taken.chunks(prices.len()).any(fits) {
                break;
            }
            behind = taken;
        }
        Row::Fails
    }

    /// Returns bytes of all devices for each byte of weights, and for each byte that is saved of the first share, at least.
    fn min_of_all_replicas(&self) -> (f64, f64) {
        let least = |each: &mut dyn Iterator<Item = f64>| each.fold(f64::INFINITY, f64::min);
        let of_weight =
            least(&mut self.splits.iter().map(|&(fewest, most, _)| f64::from(fewest) * self.of_weight(most)));
        let first = |share: usize| &self.task.totals[share].layer_saved_bytes;
        let of_saved = least(&mut self.splits.iter().map(|&(fewest, _, share)| {
            let ratios = first(share).iter().zip(first(self.splits[0].2)).filter(|&(_, &first)| first > 0.0);
            f64::from(fewest) * least(&mut ratios.map(|(bytes, first)| bytes / first))
        }));
        (of_weight, if of_saved.is_finite() { of_saved } else { 0.0 })
    }

    fn level<'e>(&self, ends: &'e Ends<'e>, from_end: u32, (of_weight, of_first): (f64, f64)) -> Level<'e> {
        let in_flight = self.in_flight(from_end);
        let of_saved = if self.task.recompute { 1.0 } else { f64::from(in_flight) };
        let held_bytes = (self.splits.iter())
            .map(|&(_, most, share)| ends.held_bytes(self.of_weight(most), of_saved, &self.task.totals[share]))
            .collect();
        let (front_bytes, _) = ends.held_bytes(of_weight, of_first * of_saved, &self.task.totals[self.splits[0].2]);
        Level { ends, in_flight, held_bytes, front_bytes }
    }

    /// Takes stages of one level that end at one place into `taken`, where those behind them cost `rest`. Returns how many
    /// splits it priced.
    fn put_stages_before(
        &self,
        end: usize,
        level: &Level<'_>,
        prices: &[Price],
        rest: &[f64],
        taken: &mut [f64],
    ) -> usize {
        let Subproblem { model, settings, recompute, .. } = *self.task;
        let last = level.ends.count() - 1;
        // What grows with the layers, whatever a stage receives and sends.
        let growing_bytes = |begin: usize, split: usize| {
            let (least, most) = &level.held_bytes[split];
            least[end] - most[begin] - ROUNDING * most[last]
        };
        let is_small = |begin: usize, split: usize, capacity_bytes: f64| match level.ends {
            Ends::Slices(_) => growing_bytes(begin, split) <= capacity_bytes,
            Ends::Cuts(_) => {
                let (_, most, share) = self.splits[split];
                let totals = &self.task.totals[share];
                let stage = (begin, end);
                cost::memory(model, totals, &settings.memory, stage, most, level.in_flight, recompute).total_bytes()
                    <= capacity_bytes
            }
        };
        let mut priced = 0;
        // For each capacity the first split that still may fit.
        let mut first = vec![0; self.capacities.len()];
        for begin in level.ends.begins(end) {
            let begin = begin as usize;
            let mut fitting = self.splits.len();
            let mut is_too_large = true;
            for (class, &(capacity_bytes, devices)) in self.capacities.iter().enumerate() {
                let is_enough = |split: usize| self.splits[split].0 <= devices;
                let mut at = first[class];
                while at < fitting && is_enough(at) && growing_bytes(begin, at) > capacity_bytes {
                    at += 1;
                    priced += 1;
                }
                if level.ends.is_nested() {
                    first[class] = at; // so is each stage that begins earlier
                }
                is_too_large &= fitting == self.splits.len() && !(at < fitting && is_enough(at));
                let found = (at..fitting).take_while(|&split| is_enough(split)).find(|&split| {
                    priced += 1;
                    is_small(begin, split, capacity_bytes)
                });
                // A larger device with as many replicas costs no less.
                let Some(split) = found else { continue };
                fitting = split;
                for ((taken, &rest), price) in taken[begin * prices.len()..].iter_mut().zip(rest).zip(prices) {
                    *taken = taken.min(rest + price.of_stage[class][split]);
                }
            }
            if is_too_large && level.ends.is_nested() {
                break;
            }
        }
        priced
    }
}
