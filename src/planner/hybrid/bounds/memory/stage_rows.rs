//! Conditions 3 and 4 of lemma *Memory* (docs/proofs.md): there is a row of stages, each on devices with memory for it,
//! that costs at most as much as all devices, for any costs of devices. In condition 3, stages are between cuts of a
//! model, in condition 4 between slices of all cuts.

use super::slices::Slices;
use super::{Conditions, ROUNDING, Row};
use crate::control::Control;
use crate::cost::nesting::Descending;
use crate::cost::{LayerSums, Totals};
use crate::planner::effort::bounds;
use crate::planner::hybrid::settings::Recompute;

/// Places at which stages of a row may end.
pub(super) enum Ends<'a> {
    /// The cuts of a model (condition 3).
    Cuts(&'a LayerSums),
    /// Slices of all cuts of a branching model (condition 4).
    Slices(Slices),
}

impl Ends<'_> {
    /// Returns the number of ends, the empty and the full cut included.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Cuts(model) => model.cuts(),
            Self::Slices(slices) => slices.count(),
        }
    }

    /// Returns the number of possible stages.
    pub(super) fn pairs(&self) -> usize {
        match self {
            Self::Cuts(model) => model.pairs(),
            Self::Slices(slices) => slices.count() * (slices.count() - 1) / 2,
        }
    }

    /// Returns whether stages with the same end never hold less if they begin earlier.
    pub(super) fn is_nested(&self) -> bool {
        match self {
            Self::Cuts(model) => model.is_chain,
            Self::Slices(_) => true,
        }
    }

    /// Returns the begins of the stages that end at `end`, the latest first.
    pub(super) fn begins(&self, end: usize) -> Descending<'_> {
        match self {
            Self::Cuts(model) => model.begins(end),
            Self::Slices(_) => Descending::Range((0..end as u32).rev()),
        }
    }

    /// Returns a lower and an upper bound, for each end, on the bytes that all layers below it hold. Each byte of trained
    /// weights counts `of_weight` bytes, each of frozen weights `of_frozen`, and each saved byte of a replica with these
    /// `totals` counts `of_saved`.
    pub(super) fn held_bytes(
        &self,
        (of_weight, of_frozen): (f64, f64),
        of_saved: f64,
        totals: &Totals,
    ) -> (Vec<f64>, Vec<f64>) {
        match self {
            Self::Cuts(model) => {
                let below = model.parameter_bytes.iter().zip(&model.frozen_bytes).zip(&totals.saved_bytes);
                let held: Vec<f64> = below
                    .map(|((trained, frozen), saved)| of_weight * trained + of_frozen * frozen + of_saved * saved)
                    .collect();
                (held.clone(), held)
            }
            Self::Slices(slices) => slices.held_bytes(of_weight, of_saved, totals),
        }
    }
}

/// Stages with the same number of stages behind them, and so the same number of micro-batches in flight.
pub(super) struct Level<'a> {
    ends: &'a Ends<'a>,
    in_flight: u32,
    /// Lower and upper bounds on the bytes of all layers below each end, for each range of replicas.
    held_bytes: Vec<(Vec<f64>, Vec<f64>)>,
    /// Lower bounds on the bytes of all layers below each end, on all devices together, in stages of this level or
    /// further in front.
    front_bytes: Vec<f64>,
}

/// Costs of devices, of which larger ones cost no less than smaller ones. They have no unit.
struct DeviceCosts {
    /// Smallest cost of a stage that needs devices of at least a capacity, by capacity and range of replicas.
    of_stage: Vec<Vec<f64>>,
    /// Cost of all devices, and a tolerance for rounding.
    of_all: f64,
    /// Smallest cost per byte of a device.
    of_byte: f64,
}

impl Conditions<'_> {
    /// Returns the costs of devices to check: 1 for each device, the memory of each device, and others in which large
    /// devices cost more than small ones.
    fn device_costs(&self) -> Vec<DeviceCosts> {
        let classes = self.capacities.len();
        let above = |class: usize| self.capacities.get(class).map_or(0, |&(_, devices)| devices);
        let counts: Vec<u32> = (0..classes).map(|class| above(class) - above(class + 1)).collect();
        let mut each: Vec<Vec<f64>> = vec![vec![1.0; classes]];
        if classes > 1 {
            each.push(self.capacities.iter().map(|&(capacity_bytes, _)| capacity_bytes.max(0.0)).collect());
            let steps = (bounds::MAX_DEVICE_COSTS / (classes - 1)).max(1);
            for first_large in (1..classes).take(bounds::MAX_DEVICE_COSTS) {
                for step in 0..steps {
                    let small = step as f64 / steps as f64;
                    each.push((0..classes).map(|class| if class < first_large { small } else { 1.0 }).collect());
                }
            }
        }
        let device_costs = |of_class: Vec<f64>| {
            // Larger devices cost no less, so the cheapest choice takes the smallest devices that suffice.
            let min_cost = |class: usize, replicas: u32| {
                let mut missing = replicas;
                let mut sum = 0.0;
                for (&count, &cost) in counts.iter().zip(&of_class).skip(class) {
                    let taken = missing.min(count);
                    sum += f64::from(taken) * cost;
                    missing -= taken;
                }
                sum
            };
            let of_stage = (0..classes)
                .map(|class| {
                    self.replica_ranges.iter().map(|&(min_replicas, ..)| min_cost(class, min_replicas)).collect()
                })
                .collect();
            let of_byte = (self.capacities.iter().zip(&of_class))
                .filter(|&(&(capacity_bytes, _), _)| capacity_bytes > 0.0)
                .map(|(&(capacity_bytes, _), &cost)| cost / capacity_bytes)
                .fold(f64::INFINITY, f64::min);
            let of_byte = if of_byte.is_finite() { of_byte } else { 0.0 };
            DeviceCosts { of_stage, of_all: min_cost(0, self.capacities[0].1) * (1.0 + ROUNDING), of_byte }
        };
        each.into_iter().map(device_costs).collect()
    }

    /// Checks condition 3 or 4. For each choice of costs by itself, a dynamic program finds the cheapest row of stages,
    /// from the last stage to the first. It lets stages use the same devices, which only makes rows cheaper.
    ///
    /// It checks about `max_checked` pairs of a stage and a range of replicas at most.
    pub(super) fn check_row(&self, ends: &Ends<'_>, max_checked: usize, control: &Control) -> Row {
        let last = ends.count() - 1;
        if self.replica_ranges.is_empty() || ends.pairs() > max_checked {
            return if self.replica_ranges.is_empty() { Row::Fails } else { Row::Unknown };
        }
        let max_stages = (self.task.settings.max_stages as usize).min(last).min(self.capacities[0].1 as usize);
        // Levels matter only where stages farther in front hold more micro-batches.
        let has_levels = self.in_flight(2) > self.in_flight(1);
        let levels = if has_levels { max_stages.min(self.task.micro_batches as usize) } else { 1 };
        let (costs, min_bytes) = (self.device_costs(), self.min_bytes_of_all_devices());
        // Smallest costs of the stages behind each end, one for each choice of costs.
        let mut behind = vec![f64::INFINITY; (last + 1) * costs.len()];
        behind[last * costs.len()..].fill(0.0);
        let mut checked = 0;
        for from_end in 1..=levels {
            // Past the limit, stages further in front count as stages of this level. They really hold no fewer
            // micro-batches, so the condition becomes weaker, never wrong.
            let is_last = from_end == levels || checked >= max_checked;
            let level = self.level(ends, from_end as u32, min_bytes);
            // A sum takes about an eighth of the time of a check.
            checked += ends.count() * self.replica_ranges.len() / 8;
            let mut taken = vec![f64::INFINITY; behind.len()];
            for end in (1..=last).rev() {
                let mut rest = behind[end * costs.len()..][..costs.len()].to_vec();
                if is_last {
                    let of_level = &taken[end * costs.len()..];
                    rest.iter_mut().zip(of_level).for_each(|(rest, &of_level)| *rest = rest.min(of_level));
                }
                let front_bytes = level.front_bytes[end] * (1.0 - ROUNDING);
                // The layers in front need at least `front_bytes`. If they cost too much under any choice, no row is
                // left.
                let is_over = |(&rest, cost): (&f64, &DeviceCosts)| rest + front_bytes * cost.of_byte > cost.of_all;
                if rest.iter().zip(&costs).any(is_over) {
                    continue;
                }
                if control.should_stop() {
                    return Row::Unknown;
                }
                checked += self.put_stages_before(end, &level, &costs, &rest, &mut taken);
            }
            let fits = |taken: &[f64]| taken.iter().zip(&costs).all(|(&taken, cost)| taken <= cost.of_all);
            if fits(&taken[..costs.len()]) {
                return if is_last && from_end < levels { Row::Unknown } else { Row::Fits };
            }
            if is_last || !taken.chunks(costs.len()).any(fits) {
                break;
            }
            behind = taken;
        }
        Row::Fails
    }

    /// Returns lower bounds on the bytes of all devices of a stage together: per byte of its trained and of its frozen
    /// weights, and per byte that it saves of the first share.
    fn min_bytes_of_all_devices(&self) -> ((f64, f64), f64) {
        let minimum = |each: &mut dyn Iterator<Item = f64>| each.fold(f64::INFINITY, f64::min);
        let [of_weight, of_frozen] =
            [|of: (f64, f64)| of.0, |of: (f64, f64)| of.1].map(|kind: fn((f64, f64)) -> f64| {
                minimum(&mut self.replica_ranges.iter().map(|&(min_replicas, max_replicas, _)| {
                    f64::from(min_replicas) * kind(self.bytes_per_weight_byte(max_replicas))
                }))
            });
        let first = |totals_index: usize| &self.task.totals[totals_index].layer_saved_bytes;
        let of_saved = minimum(&mut self.replica_ranges.iter().map(|&(min_replicas, _, totals_index)| {
            let ratios =
                first(totals_index).iter().zip(first(self.replica_ranges[0].2)).filter(|&(_, &first)| first > 0.0);
            f64::from(min_replicas) * minimum(&mut ratios.map(|(bytes, first)| bytes / first))
        }));
        ((of_weight, of_frozen), if of_saved.is_finite() { of_saved } else { 0.0 })
    }

    /// Returns the level of stages with `from_end` stages behind their begin, themselves included. `of_weight` and
    /// `of_first` are the bounds of [`Self::min_bytes_of_all_devices`].
    fn level<'e>(&self, ends: &'e Ends<'e>, from_end: u32, (of_weight, of_first): ((f64, f64), f64)) -> Level<'e> {
        let in_flight = self.in_flight(from_end);
        // With recomputation, a stage holds the activations of one micro-batch at least.
        let of_saved = if self.task.recompute == Recompute::Never { f64::from(in_flight) } else { 1.0 };
        let held_bytes = (self.replica_ranges.iter())
            .map(|&(_, max_replicas, totals_index)| {
                ends.held_bytes(self.bytes_per_weight_byte(max_replicas), of_saved, &self.task.totals[totals_index])
            })
            .collect();
        let (front_bytes, _) =
            ends.held_bytes(of_weight, of_first * of_saved, &self.task.totals[self.replica_ranges[0].2]);
        Level { ends, in_flight, held_bytes, front_bytes }
    }

    /// Takes the stages of one level with this end into `taken`, the smallest costs by begin. The stages behind them
    /// cost `rest`. Returns the number of pairs of a stage and a range of replicas that were checked.
    fn put_stages_before(
        &self,
        end: usize,
        level: &Level<'_>,
        costs: &[DeviceCosts],
        rest: &[f64],
        taken: &mut [f64],
    ) -> usize {
        let last = level.ends.count() - 1;
        // Without receive and send buffers, which may shrink as a stage grows.
        let growing_bytes = |begin: usize, range: usize| {
            let (min_bytes, max_bytes) = &level.held_bytes[range];
            min_bytes[end] - max_bytes[begin] - ROUNDING * max_bytes[last]
        };
        let is_small = |begin: usize, range: usize, capacity_bytes: f64| match level.ends {
            Ends::Slices(_) => growing_bytes(begin, range) <= capacity_bytes,
            Ends::Cuts(_) => {
                let (_, max_replicas, totals_index) = self.replica_ranges[range];
                let totals = &self.task.totals[totals_index];
                self.task.memory(totals, (begin, end), max_replicas).least_bytes(level.in_flight) <= capacity_bytes
            }
        };
        let mut checked = 0;
        // First range of replicas that still may fit, for each capacity.
        let mut first = vec![0; self.capacities.len()];
        for begin in level.ends.begins(end) {
            let begin = begin as usize;
            let mut fitting = self.replica_ranges.len();
            let mut is_too_large = true;
            for (class, &(capacity_bytes, devices)) in self.capacities.iter().enumerate() {
                let is_enough = |range: usize| self.replica_ranges[range].0 <= devices;
                let mut at = first[class];
                while at < fitting && is_enough(at) && growing_bytes(begin, at) > capacity_bytes {
                    at += 1;
                    checked += 1;
                }
                if level.ends.is_nested() {
                    first[class] = at; // Stages that begin earlier hold no less, so they skip the same ranges.
                }
                is_too_large &= fitting == self.replica_ranges.len() && !(at < fitting && is_enough(at));
                let found = (at..fitting).take_while(|&range| is_enough(range)).find(|&range| {
                    checked += 1;
                    is_small(begin, range, capacity_bytes)
                });
                // Larger devices with the same number of replicas cost no less, so only smaller numbers are left to
                // try.
                let Some(range) = found else { continue };
                fitting = range;
                for ((taken, &rest), cost) in taken[begin * costs.len()..].iter_mut().zip(rest).zip(costs) {
                    *taken = taken.min(rest + cost.of_stage[class][range]);
                }
            }
            if is_too_large && level.ends.is_nested() {
                break;
            }
        }
        checked
    }
}
