//! Conditions that every plan meets whose stages fit the devices' memory.
//!
//! Where one of them fails no plan fits, and no search is needed to say so. They leave out what a plan may avoid (links,
//! speeds, the devices' machines), so that a plan that meets all of them may still not exist. docs/proofs.md, *Memory*,
//! proves them.

mod slices;

use crate::planner::effort::bounds;
use rayon::prelude::*;

use crate::control::Control;
use crate::cost::compute::Descending;
use crate::cost::network::Cluster;
use crate::cost::{self, Model, Totals};
use crate::error::Result;
use crate::model::lineage::Lineage;
use crate::planner::hybrid::bounds::memory::slices::Slices;
use crate::planner::hybrid::settings::Settings;
use crate::planner::hybrid::subproblem::Task;

/// Which plans a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedules {
    /// Whether the warm-up is that of the settings. Otherwise a stage may hold a single micro-batch.
    pub warms_up: bool,
    /// Whether each device has one stage.
    pub one_stage_a_device: bool,
}

impl Schedules {
    /// The schedule of the settings.
    pub const OF_SETTINGS: Self = Self { warms_up: true, one_stage_a_device: true };
}

/// Share of the whole model's memory that sums in another order may differ by.
const ROUNDING: f64 = 1e-9;

/// Returns whether it is certain that no plan fits the devices' memory. `false` means that nothing is known.
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for input that makes no sense.
pub fn nothing_fits(
    model: &Model,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    shows(model, cluster, settings, schedules, &[bounds::MAX_CHECKED, bounds::MAX_CHECKED_AGAIN], control)
}

/// Returns the same for the settings' schedule after a short look.
///
/// # Errors
/// As [`nothing_fits`].
pub(crate) fn nothing_fits_at_a_glance(
    model: &Model,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<bool> {
    shows(model, cluster, settings, Schedules::OF_SETTINGS, &[bounds::MAX_CHECKED_BRIEFLY], control)
}

/// Returns the same if in each turn so many splits may be priced.
fn shows(
    model: &Model,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    turns: &[usize],
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Task::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    // The conditions on stages take longest, so those on layers come first for all sizes.
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    if !(model.has_all_cuts && schedules.one_stage_a_device) {
        return Ok(open.is_empty());
    }
    Ok(no_rows_fit(&open, &Ends::Cuts(model), turns, control))
}

/// Returns whether it is certain that no row of stages fits for any micro-batch size.
fn no_rows_fit(sizes: &[&Conditions<'_>], ends: &Ends<'_>, turns: &[usize], control: &Control) -> bool {
    let mut open = sizes.to_vec();
    for priced in turns {
        let most_priced = priced / open.len().max(1);
        // A size for which a row fits ends all of it. Those for which nothing is known yet are looked at more closely.
        let rows = open.par_iter().map(|each| match each.row(ends, most_priced, control) {
            Row::Fits => Err(()),
            Row::Unknown => Ok(Some(*each)),
            Row::Fails => Ok(None),
        });
        let Ok(unknown) = rows.collect::<std::result::Result<Vec<_>, ()>>() else { return false };
        open = unknown.into_iter().flatten().collect();
        if open.is_empty() {
            return true;
        }
    }
    false
}

/// Whether stages of one micro-batch size can follow one another.
enum Row {
    Fits,
    Fails,
    /// What was priced does not tell.
    Unknown,
}

/// Returns whether [`nothing_fits`] is certain of it whatever the cuts of `model` are: of one with a `lineage`, all cuts
/// count.
///
/// # Errors
/// As [`nothing_fits`].
pub fn nothing_fits_with_any_cuts(
    model: &Model,
    lineage: Option<&Lineage>,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Task::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    let Some(lineage) = lineage.filter(|_| schedules.one_stage_a_device && !open.is_empty()) else {
        return Ok(open.is_empty());
    };
    let ends = Ends::Slices(Slices::new(model, lineage));
    Ok(no_rows_fit(&open, &ends, &[bounds::MAX_CHECKED, bounds::MAX_CHECKED_AGAIN], control))
}

/// Where stages in a row may end: at the cuts of a model, or in slices of all its cuts.
enum Ends<'a> {
    Cuts(&'a Model),
    Slices(Slices),
}

impl Ends<'_> {
    fn count(&self) -> usize {
        match self {
            Self::Cuts(model) => model.cuts(),
            Self::Slices(slices) => slices.count(),
        }
    }

    /// Returns how many stages there are to choose from.
    fn pairs(&self) -> usize {
        match self {
            Self::Cuts(model) => model.pairs(),
            Self::Slices(slices) => slices.count() * (slices.count() - 1) / 2,
        }
    }

    /// Returns whether a stage that begins earlier holds no less.
    fn is_nested(&self) -> bool {
        match self {
            Self::Cuts(model) => model.is_chain,
            Self::Slices(_) => true,
        }
    }

    fn begins(&self, end: usize) -> Descending<'_> {
        match self {
            Self::Cuts(model) => model.begins(end),
            Self::Slices(_) => Descending::Range((0..end as u32).rev()),
        }
    }

    /// Returns for each end what all layers below it hold at least and at most, with so many bytes for each byte of weights
    /// and for each one that is saved.
    fn held_bytes(&self, of_weight: f64, of_saved: f64, totals: &Totals) -> (Vec<f64>, Vec<f64>) {
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
struct Level<'a> {
    ends: &'a Ends<'a>,
    in_flight: u32,
    /// For each split, what all layers below each end hold at least and at most.
    held_bytes: Vec<(Vec<f64>, Vec<f64>)>,
    /// What all layers below each end hold at least on all devices together, in stages of this level or further in front.
    front_bytes: Vec<f64>,
}

/// Returns the share of the largest device that something counts as. For sizes that fit the largest device together, the sum
/// of what they count as is at most what the sum of the sizes counts as.
fn counted(bytes: f64, largest_bytes: f64, smallest: f64) -> f64 {
    let share = if largest_bytes > 0.0 { bytes / largest_bytes } else { 0.0 };
    if smallest > 0.0 && share > 1.0 - smallest {
        1.0
    } else if share < smallest {
        0.0
    } else {
        share
    }
}

/// What devices cost, the larger ones no less than the smaller.
struct Price {
    /// For each capacity and each split, the cheapest devices for a stage that needs devices of at least that capacity.
    of_stage: Vec<Vec<f64>>,
    /// All devices, and some more for rounding.
    of_all: f64,
    /// The least for a byte of a device.
    of_byte: f64,
}

/// The conditions on plans of one micro-batch size.
struct Conditions<'a> {
    task: &'a Task<'a>,
    schedules: Schedules,
    /// For each amount of memory that some device has, ascending, how many devices have at least that much.
    capacities: Vec<(f64, u32)>,
    /// For each share the fewest and the most replicas that get it, and the index of its totals.
    splits: Vec<(u32, u32, usize)>,
}

impl<'a> Conditions<'a> {
    fn new(task: &'a Task<'a>, schedules: Schedules) -> Self {
        let mut devices: Vec<(f64, u32)> =
            task.cluster.machines.iter().map(|machine| (machine.memory_bytes, machine.devices)).collect();
        devices.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut capacities: Vec<(f64, u32)> = Vec::new();
        let mut count = 0;
        for (memory_bytes, devices) in devices {
            count += devices;
            let capacity_bytes = memory_bytes - task.settings.memory.reserved_bytes;
            match capacities.last_mut() {
                Some((last, all)) if last.total_cmp(&capacity_bytes).is_eq() => *all = count,
                _ => capacities.push((capacity_bytes, count)),
            }
        }
        capacities.reverse();
        let mut splits: Vec<(u32, u32, usize)> = Vec::new();
        for (replicas, share) in (0_u32..).zip(&task.share) {
            let Some(share) = share.map(|share| share as usize) else { continue };
            match splits.last_mut() {
                Some((_, most, last)) if *last == share => *most = replicas,
                _ => splits.push((replicas, replicas, share)),
            }
        }
        Self { task, schedules, capacities, splits }
    }

    /// Returns the smallest capacity that `replicas` devices have which need so much each. `None` if there are too few of
    /// them.
    fn capacity_bytes(&self, needed_bytes: f64, replicas: u32) -> Option<f64> {
        let at = self.capacities.partition_point(|&(capacity_bytes, _)| capacity_bytes < needed_bytes);
        self.capacities.get(at).filter(|&&(_, devices)| replicas <= devices).map(|&(capacity_bytes, _)| capacity_bytes)
    }

    /// Micro-batches that a stage holds at least, if so many stages, itself included, are behind its begin.
    fn in_flight(&self, from_end: u32) -> u32 {
        if self.schedules.warms_up { self.task.settings.windows(from_end, self.task.micro_batches).0 } else { 1 }
    }

    /// Bytes of a device for each byte of weights that it holds, shared by so many replicas.
    fn of_weight(&self, replicas: u32) -> f64 {
        let memory = &self.task.settings.memory;
        let sharing = if memory.shard_optimizer { f64::from(replicas) } else { 1.0 };
        1.0 + memory.gradients_per_weight + memory.optimizer_per_weight / sharing
    }

    /// Returns whether each layer fits some devices, and all layers together fit all devices.
    fn fit_layers(&self) -> bool {
        let Task { model, recompute, .. } = *self.task;
        let in_flight = if recompute { 1.0 } else { f64::from(self.in_flight(1)) };
        // Stages on one device recompute one after another. Otherwise all hold the first micro-batch when its last forward ends.
        let are_all_saved = self.schedules.one_stage_a_device || !recompute;
        let largest_bytes = self.capacities.last().map_or(0.0, |&(capacity_bytes, _)| capacity_bytes.max(0.0));
        // What fits a device of at most so much memory is not counted, nor are these devices.
        let smaller = self.capacities.iter().rev().skip(1).take(bounds::MAX_CAPACITIES_LEFT_OUT);
        let floors: Vec<f64> = smaller.map(|&(capacity_bytes, _)| capacity_bytes).chain([f64::NEG_INFINITY]).collect();
        let ways = || floors.iter().flat_map(|&floor| bounds::EPSILONS.map(|smallest| (floor, smallest)));
        let mut sums = vec![0.0; floors.len() * bounds::EPSILONS.len()];
        for (layer, &parameter_bytes) in model.layer_parameter_bytes.iter().enumerate() {
            let mut least = vec![f64::INFINITY; sums.len()];
            for &(fewest, most, share) in &self.splits {
                // What one replica holds, without what is received and sent.
                let weights_bytes = parameter_bytes * self.of_weight(most) * (1.0 - ROUNDING);
                let saved_bytes = in_flight * self.task.totals[share].layer_saved_bytes[layer] * (1.0 - ROUNDING);
                let held_bytes = weights_bytes + saved_bytes;
                if self.capacity_bytes(held_bytes, fewest).is_none() {
                    continue;
                }
                let summed_bytes = if are_all_saved { held_bytes } else { weights_bytes };
                for (least, (floor, smallest)) in least.iter_mut().zip(ways()) {
                    let is_counted = held_bytes > floor;
                    let part = if is_counted { counted(summed_bytes, largest_bytes, smallest) } else { 0.0 };
                    *least = least.min(f64::from(fewest) * part);
                }
            }
            if least[0].is_infinite() {
                return false;
            }
            sums.iter_mut().zip(least).for_each(|(sum, least)| *sum += least);
        }
        sums.into_iter().zip(ways()).all(|(sum, (floor, smallest))| {
            let capacities = (self.task.cluster.machines.iter())
                .map(|machine| (machine.devices, machine.memory_bytes - self.task.settings.memory.reserved_bytes));
            let all: f64 = capacities
                .filter(|&(_, capacity_bytes)| capacity_bytes > floor)
                .map(|(devices, capacity_bytes)| {
                    f64::from(devices) * counted(capacity_bytes.max(0.0), largest_bytes, smallest)
                })
                .sum();
            sum * (1.0 - ROUNDING) <= all
        })
    }

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
    fn row(&self, ends: &Ends<'_>, most_priced: usize, control: &Control) -> Row {
        let last = ends.count() - 1;
        if self.splits.is_empty() || ends.pairs() > most_priced {
            return if self.splits.is_empty() { Row::Fails } else { Row::Unknown };
        }
        let most_stages = (self.task.settings.most_stages as usize).min(last).min(self.capacities[0].1 as usize);
        let has_levels = self.in_flight(2) > self.in_flight(1);
        let levels = if has_levels { most_stages.min(self.task.micro_batches as usize) } else { 1 };
        let (prices, least) = (self.prices(), self.least_of_all_replicas());
        // For each end the least that the stages behind it take under each price by itself.
        let mut behind = vec![f64::INFINITY; (last + 1) * prices.len()];
        behind[last * prices.len()..].fill(0.0);
        let mut priced = 0;
        for from_end in 1..=levels {
            // The last level stands for all numbers of stages from there on.
            let is_last = from_end == levels || priced >= most_priced;
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
    fn least_of_all_replicas(&self) -> (f64, f64) {
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
        let Task { model, settings, recompute, .. } = *self.task;
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
