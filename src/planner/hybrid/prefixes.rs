//! The least that any stages in front of a cut add to the paths of a suffix, were every stage placed at its best.
//!
//! One relaxed pass over cuts and numbers of devices, from the first cut to the last. Of machines it only knows how much
//! room is left on that of the stage behind a cut, if that stage lies in one: each stage gets the best links that
//! [`Links`] leaves it. Devices that differ are counted in [`Units`]: a stage is of a kind, and takes what its devices
//! count at least. Each table below is the least of its own, so together they never exceed what a real plan adds.

use std::sync::Arc;

use rayon::prelude::*;

use super::groups::Groups;
use super::kinds::{Kind, Units, kinds};
use super::links::{Links, least};
use super::paths::Paths;
use super::settings::largest_window;
use super::smaller::{Inner, Synced};
use super::task::Task;
use crate::control::Control;
use crate::cost::network::Rate;
use crate::cost::{self, Totals};

/// More devices than this are rounded up to one of as many levels, ...
const MOST_LEVELS: u32 = 192;
/// ... or fewer, but not than these.
const FEWEST_LEVELS: u32 = 32;
/// How much tables tell apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Detail {
    /// Stages, with numbers of devices in front of them, that one table looks at, where that is possible; all tables
    /// together look at [`DEEP`] times as many.
    pub work: f64,
    /// Groups of cuts, where there are more cuts.
    pub groups: usize,
}

/// What passes ask, which tell apart themselves what tables don't, ...
const FOR_PASSES: Detail = Detail { work: 8e6, groups: usize::MAX };
/// ... and what tables are asked alone.
pub(super) const ALONE: Detail = Detail { work: 3e7, groups: usize::MAX };
const DEEP: f64 = 5.0;
/// Tables that look at more are made by several threads.
const LARGE: f64 = 1e6;
/// Entries that all tables have at most.
const MOST_ENTRIES: usize = 3_000_000;
/// Numbers of replicas this far apart, at most, count as one: the first that makes the tables small enough.
const APART: [f64; 8] = [1.0, 1.07, 1.15, 1.3, 1.6, 2.5, 6.0, 40.0];
/// What it takes to look at one of them, in nanoseconds or so.
const LOOK: u64 = 4;
/// What it takes to find a stage between two cuts, to look at it with one split, and to know what there is to sum at one
/// rate, in nanoseconds or so.
const FIND: u64 = 40;
const PAIR: u64 = 20;
const SUM: u64 = 10;
/// Stages that are looked at to guess the work.
const GUESSED: usize = 30_000;
/// Groups of cuts that are told apart, if not each cut, and stages that a plan is thought to have at most.
const GROUPS: [usize; 3] = [192, 96, 48];
const MOST_STAGES: u32 = 16;

/// What the stages in front of a cut add, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// To `drained`: forwards, backwards and transfers both ways of one micro-batch.
    trip_s: f64,
    /// To `synced`: forwards and transfers of one micro-batch.
    fill_s: f64,
    /// To `first_back`: one of the stages still has all backwards before it.
    backwards_s: f64,
    /// To `last_back`: one of the stages had all forwards behind it.
    forwards_s: f64,
    /// To `last_synced`: likewise.
    starts_s: f64,
    /// To `drained`: the way up to one of the stages, and its gradient synchronisation.
    syncs_s: f64,
    /// To `first_back`: one of the stages waits for its first round trip, less the forwards that take place meanwhile;
    /// then the way up from there to one of the stages, and its gradient synchronisation.
    waits_s: f64,
    /// To `first_back` and `last_back` together: likewise, for its last round trip, too.
    both_s: f64,
}

impl Least {
    /// No stages fit there.
    const NONE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Nothing is in front, so nobody waits.
    pub(super) const EMPTY: Self = Self::all(0.0, f64::NEG_INFINITY);

    const fn all(each_s: f64, both_s: f64) -> Self {
        Self {
            trip_s: each_s,
            fill_s: each_s,
            backwards_s: each_s,
            forwards_s: each_s,
            starts_s: each_s,
            syncs_s: each_s,
            waits_s: each_s,
            both_s,
        }
    }
}

/// The lesser of two numbers, in one instruction.
#[inline]
fn lesser(one: f64, other: f64) -> f64 {
    if other < one { other } else { one }
}

/// The greater of two numbers, in one instruction.
#[inline]
fn greater(one: f64, other: f64) -> f64 {
    if other > one { other } else { one }
}

/// Names of [`Least::sums_s`].
#[cfg(test)]
pub(super) const SUMS: [&str; 8] = ["trip", "syncs", "fill", "backwards", "forwards", "starts", "waits", "both"];

/// What a stage in front of a cut, and its transfer to the stage behind it, do to each of them, in their order: each
/// becomes the longer of itself and this, and of a way through the stages before to this one and what that takes.
struct FrontStage {
    longer_s: [f64; 8],
    own_s: [f64; 8],
    sync_s: f64,
}

impl FrontStage {
    fn new(forward_s: f64, backward_s: f64, sync_s: f64, transfer_s: f64, window: u32, micro_batches: u32) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(window - 1);
        let work_s = forward_s + backward_s;
        let trip_s = work_s + 2.0 * transfer_s;
        let fill_s = forward_s + transfer_s;
        let (others_forward_s, others_backward_s) = ((count - 1.0) * forward_s, (count - 1.0) * backward_s);
        let wait_s = 2.0 * transfer_s + count * work_s - skipped * forward_s;
        let both_s =
            if window < micro_batches { 4.0 * transfer_s + (count - skipped) * work_s } else { f64::NEG_INFINITY };
        Self {
            longer_s: [trip_s, fill_s, trip_s, trip_s, fill_s, trip_s, trip_s, 2.0 * trip_s],
            own_s: [
                trip_s,
                fill_s,
                trip_s + others_backward_s,
                trip_s + others_forward_s,
                fill_s + others_forward_s,
                trip_s + sync_s,
                wait_s,
                both_s,
            ],
            sync_s,
        }
    }
}

impl Least {
    /// What these stages and one more behind them add.
    #[cfg(test)]
    pub(super) fn behind(&self, stage: &super::paths::PathStage, micro_batches: u32) -> Self {
        let transfer_s = stage.busy_s + stage.latency_s;
        let (forward_s, backward_s, sync_s) = (stage.forward_s, stage.backward_s, stage.sync_s);
        let stage = FrontStage::new(forward_s, backward_s, sync_s, transfer_s, stage.window, micro_batches);
        let mut least = Self::NONE;
        least.lower(&stage, self);
        least
    }

    /// Takes a stage into account that has `before` in front of it.
    #[inline]
    fn lower(&mut self, stage: &FrontStage, before: &Self) {
        let Self { trip_s, fill_s, .. } = *before;
        // The way back up to one of the stages, or to this one, and the synchronisation of that one.
        let synced_s = greater(before.syncs_s, fill_s + stage.sync_s);
        let lower = |value: &mut f64, at: usize, own_s: f64, way_s: f64| {
            *value = lesser(*value, greater(own_s + stage.longer_s[at], way_s + stage.own_s[at]));
        };
        lower(&mut self.trip_s, 0, trip_s, trip_s);
        lower(&mut self.fill_s, 1, fill_s, fill_s);
        lower(&mut self.backwards_s, 2, before.backwards_s, trip_s);
        lower(&mut self.forwards_s, 3, before.forwards_s, trip_s);
        lower(&mut self.starts_s, 4, before.starts_s, fill_s);
        lower(&mut self.syncs_s, 5, before.syncs_s, fill_s);
        lower(&mut self.waits_s, 6, before.waits_s, synced_s);
        lower(&mut self.both_s, 7, before.both_s, synced_s);
    }

    /// With the paths of a suffix: a step is none of these shorter. [`SUMS`] names them.
    #[inline]
    pub(super) fn sums_s(&self, paths: &Paths) -> [f64; 8] {
        [
            paths.drained_s + self.trip_s,
            paths.drained_s + self.syncs_s,
            paths.synced_s + self.fill_s,
            paths.first_back_s + self.backwards_s,
            paths.last_back_s + self.forwards_s,
            paths.last_synced_s + self.starts_s,
            paths.first_back_s + self.waits_s,
            paths.first_back_s + paths.last_back_s + self.both_s,
        ]
    }

    /// No plan with these stages in front is shorter, if a micro-batch takes so long behind them.
    fn least_s(&self, behind_s: f64) -> f64 {
        let Self { trip_s, fill_s, backwards_s, forwards_s, starts_s, syncs_s, waits_s, both_s } = *self;
        let through_s = trip_s.max(backwards_s).max(forwards_s).max(syncs_s).max(waits_s).max(both_s + behind_s);
        (through_s + behind_s).max(fill_s).max(starts_s)
    }

    /// The lesser of each.
    fn or(&self, other: &Self) -> Self {
        Self {
            trip_s: self.trip_s.min(other.trip_s),
            fill_s: self.fill_s.min(other.fill_s),
            backwards_s: self.backwards_s.min(other.backwards_s),
            forwards_s: self.forwards_s.min(other.forwards_s),
            starts_s: self.starts_s.min(other.starts_s),
            syncs_s: self.syncs_s.min(other.syncs_s),
            waits_s: self.waits_s.min(other.waits_s),
            both_s: self.both_s.min(other.both_s),
        }
    }
}

/// The tables.
pub(super) struct Prefixes {
    grouping: Arc<Grouping>,
    /// How many cases of room there are: one if any stage may be anywhere; else the first for a stage behind the cut
    /// that is spread over machines, the others for one that leaves no, one, two … devices on its machine.
    rooms: usize,
    /// One table for each number of stages behind the cut, the last one for more.
    least: Vec<Table>,
    /// For each cut, what all micro-batches keep devices of speed 1 busy with in front of it, at least.
    busy_s: Vec<f64>,
    /// What all tables together took, in nanoseconds or so.
    pub work: u64,
}

/// Where entries are, but for the cut: the table, the case of room, and the level of devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    table: usize,
    room: usize,
    level: usize,
}

/// What stages in front of each cut add, for one number of stages behind it.
#[derive(Clone)]
struct Table {
    /// For each cut an entry for each case of room and level; empty where no stages stand.
    least: Vec<Vec<Least>>,
    /// For each cut and case of room the lowest level of devices with which any plan is shorter than the threshold.
    first: Vec<usize>,
}

/// Which numbers of devices tables are made for, and where their entries are.
#[derive(Default)]
struct Reach {
    /// Numbers of devices, ascending.
    levels: Vec<u32>,
    /// For each group of cuts the lowest and highest level between what stages in front of it need at least and what those
    /// behind it leave at most.
    of_group: Vec<(usize, usize)>,
    /// All together.
    entries: usize,
}

impl Reach {
    /// If no stage is at work for `threshold_s`; one level is kept where there is none.
    fn new(
        task: &Task<'_>,
        units: &Units,
        groups: &Groups,
        work_s: &[f64],
        threshold_s: f64,
        most_levels: u32,
    ) -> Self {
        // Of the fastest devices, as many as are of use.
        let mut speeds: Vec<(f64, u32, u32)> =
            task.cluster.machines.iter().map(|m| (m.speed, m.devices, units.of(m.speed))).collect();
        speeds.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut most, mut devices) = (0, task.most_devices());
        for &(_, of_machine, each) in &speeds {
            let some = devices.min(of_machine);
            most += some * each;
            devices -= some;
        }
        let levels: Vec<u32> = if most <= most_levels {
            (0..=most).collect()
        } else {
            let part = |level| (u64::from(most) * u64::from(level)).div_ceil(u64::from(most_levels)) as u32;
            (0..=most_levels).map(part).collect()
        };
        let whole_s: f64 = work_s.iter().sum();
        speeds.sort_by(|a, b| (b.0 / f64::from(b.2)).total_cmp(&(a.0 / f64::from(a.2))));
        speeds.dedup_by(|b, a| {
            let is_same = a.0.total_cmp(&b.0).is_eq();
            a.1 += if is_same { b.1 } else { 0 };
            is_same
        });
        let (micro_batches, all) = (f64::from(task.micro_batches), f64::from(units.all(task.cluster)));
        // The fewest units that do so much work; rounding must not ask for one more.
        let fewest = |work_s: f64| {
            let mut speed = micro_batches * (work_s - 1e-9 * whole_s) / threshold_s;
            let mut fewest = 0.0;
            for &(speed_each, devices, each) in &speeds {
                let (devices, each) = (f64::from(devices), f64::from(each));
                let units = (devices * each).min((speed / speed_each * each).ceil().max(0.0));
                speed -= units / each * speed_each;
                fewest += units;
            }
            if speed > 1e-9 * micro_batches * whole_s / threshold_s { f64::INFINITY } else { fewest }
        };
        let below_s = task.model.sums_below(work_s);
        let of_group: Vec<(usize, usize)> = (groups.cuts.iter())
            .map(|cuts| {
                let below_s = || cuts.iter().map(|&cut| below_s[cut]);
                let left = (all - fewest(whole_s - below_s().fold(0.0, f64::max))).max(0.0);
                let needed = fewest(below_s().fold(f64::INFINITY, f64::min));
                let most = levels.partition_point(|&level| f64::from(level) < left).min(levels.len() - 1);
                let least = levels.partition_point(|&level| f64::from(level) < needed).min(most);
                (least, most)
            })
            .collect();
        let entries = of_group.iter().map(|(least, most)| most + 1 - least).sum();
        Self { levels, of_group, entries }
    }

    /// The lowest level of so many units.
    fn level(&self, units: u32) -> usize {
        if self.levels.get(units as usize) == Some(&units) {
            units as usize
        } else {
            self.levels.partition_point(|&level| level < units)
        }
    }

    /// Where the entry of a level is among those of its group of cuts, which is not below their lowest one. Stages behind a
    /// cut that leave more devices than its highest one are part of no plan.
    fn entry(&self, group: usize, room: usize, level: usize) -> usize {
        let (lowest, highest) = self.of_group[group];
        room * (highest + 1 - lowest) + (level.min(highest) - lowest)
    }
}

/// Which cuts tables tell apart, and which numbers of devices.
#[derive(Default)]
struct Grouping {
    groups: Groups,
    reach: Reach,
    /// For each group of cuts, what a micro-batch takes behind one at least, and how many layers are behind one at most.
    behind_s: Vec<f64>,
    layers_behind: Vec<usize>,
}

/// What all tables are made from.
struct Sources<'a> {
    task: &'a Task<'a>,
    threshold_s: f64,
    /// Of the fastest device, and of the slowest.
    speed: f64,
    slowest: f64,
    units: Units,
    /// Each with what its devices count: so much each of so many, the least first.
    kinds: Vec<(Kind, Vec<(u32, u32)>)>,
    splits: Vec<Split>,
    rooms: usize,
    grouping: Arc<Grouping>,
    /// For each layer the least that a micro-batch takes, and the least times its replicas.
    least_s: Vec<f64>,
    work_s: Vec<f64>,
    /// For each cut, the least that all layers below it take.
    least_below_s: Vec<f64>,
    /// How many splits, or tables, one thread takes at least.
    least_shared: usize,
}

/// Numbers of replicas that give their devices the same share.
struct Split {
    share: u32,
    /// The fewest leave most devices to other stages and have the least to synchronise.
    fewest: u32,
    /// The most have the smallest transfers and parts of a sharded optimizer.
    most: u32,
    /// Of which kinds its devices may be.
    kinds: Vec<Taken>,
    ways: Vec<Way>,
    /// The rates at which gradients of its stages are summed, and the speeds behind whose backwards.
    rates: Vec<(Rate, f64)>,
    /// Which of these, for each kind of each way.
    rate_of: Vec<usize>,
    /// How many times the least of all splits each layer takes at least.
    slower: f64,
}

/// The fewest devices of a split, as one kind has them.
struct Taken {
    /// Of the slowest, and of the smallest.
    speed: f64,
    memory_bytes: f64,
    /// What they count at least.
    units: u32,
    /// For each level the level of the units that are left, from `first`, the first that has enough.
    rests: Vec<usize>,
    first: usize,
}

impl Taken {
    /// The lowest level that leaves as much as this one.
    fn with_rest(&self, least: usize) -> usize {
        // Levels are about as far apart everywhere, so it is about as many levels up.
        let mut at = least.min(self.rests.len());
        while at > 0 && self.rests[at - 1] >= least {
            at -= 1;
        }
        while at < self.rests.len() && self.rests[at] < least {
            at += 1;
        }
        self.first + at
    }
}

impl Split {
    /// Those of a task, so that none has replicas farther apart than `apart` but for those that give the same share.
    fn all(task: &Task<'_>, kinds: &[(Kind, Vec<(u32, u32)>)], apart: f64) -> Vec<Self> {
        let mut splits: Vec<Self> = Vec::new();
        for (count, share) in (0_u32..).zip(&task.share) {
            let Some(share) = *share else { continue };
            match splits.last_mut() {
                Some(split) if split.share == share => split.most = count,
                // The work of many replicas on the devices of few.
                Some(split) if f64::from(count) <= apart * f64::from(split.fewest) => {
                    (split.most, split.share) = (count, share);
                }
                _ => splits.push(Self {
                    share,
                    fewest: count,
                    most: count,
                    kinds: Vec::new(),
                    ways: Vec::new(),
                    rates: Vec::new(),
                    rate_of: Vec::new(),
                    slower: 1.0,
                }),
            }
        }
        for split in &mut splits {
            for (kind, each) in kinds.iter().filter(|(kind, _)| kind.devices >= split.fewest) {
                let mut left = split.fewest;
                let taken = Taken {
                    speed: kind.speed,
                    memory_bytes: kind.memory_bytes - task.settings.memory.reserved_bytes,
                    units: (each.iter())
                        .map(|&(units, devices)| {
                            let some = left.min(devices);
                            left -= some;
                            some * units
                        })
                        .sum(),
                    rests: Vec::new(),
                    first: 0,
                };
                // More memory for as much speed, and for no more units, is the better choice for all.
                split.kinds.retain(|other| other.speed < taken.speed || other.units < taken.units);
                split.kinds.push(taken);
            }
        }
        splits
    }
}

/// The least of stages with one split from each group of cuts to another one.
struct Between {
    /// Groups that some stage begins in.
    some: Vec<usize>,
    /// At speed 1, for each group.
    forward_s: Vec<f64>,
    backward_s: Vec<f64>,
    /// At each rate of the split.
    rates: usize,
    syncs_s: Vec<f64>,
    /// The largest window, for each kind.
    kinds: usize,
    fitting: Vec<u32>,
    /// Stages that were looked at.
    looked_at: u64,
}

impl Between {
    fn new(groups: usize, split: &Split) -> Self {
        let (rates, kinds) = (split.rates.len(), split.kinds.len());
        Self {
            some: Vec::new(),
            forward_s: vec![f64::INFINITY; groups],
            backward_s: vec![f64::INFINITY; groups],
            syncs_s: vec![f64::INFINITY; groups * rates],
            rates,
            kinds,
            fitting: vec![0; groups * kinds],
            looked_at: 0,
        }
    }

    fn add(&mut self, from: usize, forward_s: f64, backward_s: f64) {
        if self.forward_s[from].is_infinite() {
            self.some.push(from);
        }
        self.forward_s[from] = self.forward_s[from].min(forward_s);
        self.backward_s[from] = self.backward_s[from].min(backward_s);
    }

    fn add_sync(&mut self, from: usize, which: usize, sync_s: f64) {
        let least_s = &mut self.syncs_s[from * self.rates + which];
        *least_s = least_s.min(sync_s);
    }

    fn sync_s(&self, from: usize, which: usize) -> f64 {
        self.syncs_s[from * self.rates + which]
    }

    fn fitting(&self, from: usize, which: usize) -> u32 {
        self.fitting[from * self.kinds + which]
    }

    fn add_fitting(&mut self, from: usize, which: usize, window: u32) {
        let most = &mut self.fitting[from * self.kinds + which];
        *most = window.max(*most);
    }
}

/// Two cuts, and the least that a stage between them takes for one micro-batch at speed 1.
struct Pair {
    least_s: f64,
    /// In the order of [`crate::cost::Model::begins`].
    index: usize,
    begin: usize,
}

/// The stages that end at one cut.
struct Ends {
    end: usize,
    pairs: Vec<Pair>,
    inner: Option<Arc<Inner>>,
}

/// A way for a stage to lie beside the one behind it.
struct Way {
    /// The case of room that the stage behind gives, and the one that this stage gives.
    behind: usize,
    own: usize,
    transfer: Rate,
    sync: Rate,
}

impl Split {
    fn span(&self) -> (u32, u32) {
        (self.fewest, self.most)
    }

    /// Its ways, in one case of room or in all.
    fn ways(&self, links: &Links, rooms: usize) -> Vec<Way> {
        let span = self.span();
        let all = (1, links.spans.last().map_or(1, |span| span.1));
        let mut ways = Vec::new();
        for own in links.spreads(span) {
            let sync = links.sum_spread(own);
            ways.extend(links.any_spread(own).map(|transfer| Way { behind: 0, own: 0, transfer, sync }));
            ways.push(Way { behind: 1, own: 0, transfer: links.one_and_spread(all, own), sync });
        }
        if links.fits_one(span) {
            let sync = links.sum_in_one(span);
            let own = 1 + (links.widest - span.0) as usize;
            if links.machines > 1 {
                // The last stage may lie there when none is spread.
                let transfer = links.one_and_any_spread(span).unwrap_or_else(|| links.apart());
                ways.push(Way { behind: 0, own, transfer, sync });
                ways.push(Way { behind: 1, own, transfer: links.apart(), sync });
            } else {
                ways.push(Way { behind: 0, own, transfer: links.beside(span, all), sync });
            }
            for room in span.0..links.widest {
                let (behind, own) = (1 + room as usize, 1 + (room - span.0) as usize);
                ways.push(Way { behind, own, transfer: links.beside(span, all), sync });
            }
        }
        if rooms > 1 {
            return ways;
        }
        let both = |way: Way, other: Way| Way {
            behind: 0,
            own: 0,
            transfer: least(way.transfer, other.transfer),
            sync: least(way.sync, other.sync),
        };
        ways.into_iter().reduce(both).map(|way| Way { behind: 0, own: 0, ..way }).into_iter().collect()
    }
}

impl Prefixes {
    /// Leaves out stages that alone reach the threshold; tells at most so many numbers of stages behind a cut apart, and
    /// machines only if any. `None` if it was stopped.
    pub(super) fn new(
        task: &Task<'_>,
        links: &Links,
        threshold_s: f64,
        most_behind: usize,
        control: &Control,
    ) -> Option<Self> {
        Self::with(task, links, threshold_s, most_behind, FOR_PASSES, control)
    }

    pub(super) fn with(
        task: &Task<'_>,
        links: &Links,
        threshold_s: f64,
        most_behind: usize,
        detail: Detail,
        control: &Control,
    ) -> Option<Self> {
        let (model, cluster) = (task.model, task.cluster);
        let units = Units::new(task.cluster);
        let speeds = || cluster.machines.iter().map(|machine| machine.speed);
        let times_s: Vec<Vec<f64>> = task.totals.iter().map(|totals| layers_s(task, totals)).collect();
        let least_s: Vec<f64> = (0..model.layer_parameter_bytes.len())
            .map(|layer| times_s.iter().map(|each| each[layer]).fold(f64::INFINITY, f64::min))
            .collect();
        let mut sources = Sources {
            task,
            threshold_s,
            speed: speeds().fold(0.0, f64::max),
            slowest: speeds().fold(f64::INFINITY, f64::min),
            kinds: (kinds(task.cluster).into_iter())
                .map(|kind| {
                    let each = units.of_kind(cluster, &kind);
                    (kind, each)
                })
                .collect(),
            units,
            splits: Vec::new(),
            rooms: 1,
            grouping: Arc::default(),
            least_below_s: model.sums_below(&least_s),
            least_s,
            work_s: least_work_s(task),
            least_shared: 1,
        };
        let work = sources.choose(links, detail, most_behind > 0);
        if work < LARGE {
            sources.least_shared = usize::MAX;
        }
        let entries = sources.grouping.reach.entries * sources.rooms;
        let mut deepest = (1..=most_behind.min(model.cuts()))
            .take_while(|&tables| work * tables as f64 <= DEEP * detail.work)
            .count()
            .min(MOST_ENTRIES / entries.max(1))
            .clamp(1, model.cuts())
            .min(task.micro_batches as usize)
            .min(most_behind);
        if work > detail.work / 4.0 && !sources.is_tight(deepest as u32 + 1) {
            deepest = 1;
        }
        let mut windows: Vec<(u32, u32)> =
            (0..=deepest).map(|behind| task.settings.windows(behind as u32 + 1, task.micro_batches)).collect();
        windows[deepest].1 = task.micro_batches; // it stands for all that are farther in front
        let (least, spent) = sources.tables(&windows, control)?;
        let count = f64::from(task.micro_batches);
        let busy_s = model.sums_below(&sources.work_s).into_iter().map(|below_s| count * below_s).collect();
        Some(Self { grouping: sources.grouping, rooms: sources.rooms, least, busy_s, work: spent })
    }

    /// Where stages are that have so many devices, with room for so many on the machine of the stage behind them, if that
    /// lies in one, and so many stages behind them.
    pub(super) fn place(&self, free: u32, room: Option<u32>, behind: u32) -> Place {
        Place {
            table: (behind as usize).min(self.least.len() - 1),
            room: room.map_or(0, |room| 1 + room as usize).min(self.rooms - 1),
            level: self.grouping.reach.level(free),
        }
    }

    fn at(&self, cut: usize, Place { table, room, level }: Place) -> &Least {
        let group = self.grouping.groups.of_cut[cut] as usize;
        if level < self.grouping.reach.of_group[group].0 {
            &Least::NONE
        } else {
            self.least[table].least[group].get(self.grouping.reach.entry(group, room, level)).unwrap_or(&Least::NONE)
        }
    }

    /// The least that any plan takes from its first forward to its last backward.
    pub(super) fn least_s(&self) -> f64 {
        let last = self.at(self.grouping.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0));
        last.trip_s.max(last.backwards_s).max(last.forwards_s)
    }

    /// The least that stages in front of a cut add to one micro-batch on its way through; infinite if none fit.
    pub(super) fn trip_s(&self, cut: usize, place: Place) -> f64 {
        self.at(cut, place).trip_s
    }

    /// No plan is shorter whose stages in front of a cut have devices that do so much together, against one of speed 1.
    pub(super) fn busy_s(&self, cut: usize, free_speed: f64) -> f64 {
        if cut == 0 { 0.0 } else { self.busy_s[cut] / free_speed * (1.0 - 1e-12) }
    }

    /// No plan that ends in a suffix with these paths is shorter.
    pub(super) fn bound_s(&self, paths: &Paths, cut: usize, place: Place) -> f64 {
        self.at(cut, place).sums_s(paths).into_iter().fold(f64::NEG_INFINITY, greater)
    }

    /// No plan is shorter.
    pub(super) fn whole_s(&self) -> f64 {
        self.bound_s(&Paths::default(), self.grouping.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0))
    }
}

impl Sources<'_> {
    /// Settles which numbers of replicas and devices are told apart, and whether machines are; how much work a table is.
    fn choose(&mut self, links: &Links, detail: Detail, has_rooms: bool) -> f64 {
        // A plan has hardly more stages than micro-batches, and each stage loses a group of cuts, or half of what is joined.
        let stages = f64::from(self.task.micro_batches.min(MOST_STAGES));
        let cuts = self.task.model.cuts();
        let mut tried: Vec<(f64, usize, f64)> = std::iter::once(cuts.min(detail.groups))
            .chain(GROUPS)
            .filter(|&most| most <= cuts.min(detail.groups))
            .map(|most| (if most < cuts { stages / most as f64 } else { 0.0 }, most))
            .flat_map(|(lost, most)| APART.map(|apart| (lost + (apart - 1.0) / 2.0, most, apart)))
            .collect();
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut tried = tried.into_iter();
        let mut most_levels = MOST_LEVELS;
        let mut known: Vec<Arc<Grouping>> = Vec::new();
        let mut work;
        loop {
            if let Some((_, most, apart)) = tried.next() {
                let grouping = known.iter().find(|known| known.groups.most == most).cloned();
                self.grouping = grouping.unwrap_or_else(|| {
                    known.push(Arc::new(self.grouped(most, most_levels)));
                    known[known.len() - 1].clone()
                });
                self.splits = Split::all(self.task, &self.kinds, apart);
            } else {
                most_levels /= 2;
                self.grouping = Arc::new(self.grouped(self.grouping.groups.most, most_levels));
            }
            for split in &mut self.splits {
                let levels = &self.grouping.reach.levels;
                for kind in &mut split.kinds {
                    kind.first = levels.partition_point(|&level| level < kind.units);
                    let enough = levels[kind.first..].iter();
                    kind.rests = enough.map(|&level| self.grouping.reach.level(level - kind.units)).collect();
                }
            }
            work = self.work();
            if work <= detail.work || (tried.len() == 0 && most_levels <= FEWEST_LEVELS) {
                break;
            }
        }
        let cases = links.widest as usize + 2;
        let rise = (1 + cases / 2) as f64;
        if has_rooms
            && links.machines > 1
            && work * rise <= detail.work
            && self.grouping.reach.entries * cases <= MOST_ENTRIES
        {
            self.rooms = cases;
            work *= rise;
        }
        let mut splits = std::mem::take(&mut self.splits);
        for split in &mut splits {
            let each_s = layers_s(self.task, &self.task.totals[split.share as usize]);
            let times = each_s.iter().zip(&self.least_s).filter(|(_, least_s)| **least_s > 0.0);
            split.slower = times.map(|(each_s, least_s)| each_s / least_s).reduce(f64::min).unwrap_or(1.0);
            split.ways = split.ways(links, self.rooms);
            for (way, kind) in split.ways.iter().flat_map(|way| split.kinds.iter().map(move |kind| (way, kind))) {
                let (rate, speed) = (way.sync, self.summing(kind));
                let is_it = |known: &(Rate, f64)| known.0 == rate && known.1.total_cmp(&speed).is_eq();
                let at = split.rates.iter().position(is_it).unwrap_or(split.rates.len());
                if at == split.rates.len() {
                    split.rates.push((rate, speed));
                }
                split.rate_of.push(at);
            }
        }
        self.splits = splits;
        work
    }

    /// About how many stages, with numbers of devices in front of them, a table looks at.
    fn work(&self) -> f64 {
        let (model, groups) = (self.task.model, &self.grouping.groups.cuts);
        let every = (groups.len().pow(2) / 2 * self.splits.len()).div_ceil(GUESSED).max(1);
        let mut work = 0;
        for to in (1..groups.len()).rev().step_by(every) {
            let (lowest, highest) = self.grouping.reach.of_group[to];
            let end = groups[to][0];
            for split in &self.splits {
                let totals = &self.task.totals[split.share as usize];
                for kind in split.kinds.iter().filter(|kind| kind.first.max(lowest) <= highest) {
                    for from in (0..to).rev() {
                        let begin = groups[from][groups[from].len() - 1];
                        if self.is_short(totals, kind.speed, begin, end) {
                            let needed = kind.with_rest(self.grouping.reach.of_group[from].0);
                            work += (highest + 1).saturating_sub(needed.max(lowest));
                        } else if model.is_chain {
                            break;
                        }
                    }
                }
            }
        }
        // Each split looks at each stage, too.
        (work * every + model.pairs() * self.splits.len()) as f64
    }

    /// Whether a stage alone is at work for less than the threshold.
    fn is_short(&self, totals: &Totals, speed: f64, begin: usize, end: usize) -> bool {
        let forwards = if self.task.recompute { 2.0 } else { 1.0 };
        let work_s = forwards * (totals.forward_s[end] - totals.forward_s[begin])
            + (totals.backward_s[end] - totals.backward_s[begin]);
        f64::from(self.task.micro_batches) * work_s < self.threshold_s * speed
    }

    /// No more groups of cuts than these, or few more, and so many numbers of devices.
    fn grouped(&self, most: usize, most_levels: u32) -> Grouping {
        let model = self.task.model;
        let groups = Groups::new(model, &self.work_s, most);
        let below_s = &self.least_below_s;
        let whole_s = below_s[below_s.len() - 1];
        let most_below_s = |cuts: &Vec<usize>| cuts.iter().map(|&cut| below_s[cut]).fold(0.0, f64::max);
        let behind = |&cut: &usize| model.layers_below(model.cuts() - 1) - model.layers_below(cut);
        Grouping {
            reach: Reach::new(self.task, &self.units, &groups, &self.work_s, self.threshold_s, most_levels),
            behind_s: groups.cuts.iter().map(|cuts| whole_s - most_below_s(cuts)).collect(),
            layers_behind: groups.cuts.iter().map(|cuts| cuts.iter().map(behind).max().unwrap_or(0)).collect(),
            groups,
        }
    }

    /// The speed at which gradients of a kind's stage are summed behind its backward. The lowest of all hides the most:
    /// it stands for each where a sum goes through many layers, and where kinds aren't told apart.
    fn summing(&self, kind: &Taken) -> f64 {
        let is_own = self.task.model.is_chain && self.kinds.len() > 1;
        if is_own { kind.speed } else { self.slowest }
    }

    /// Whether so many stages, each with a layer, may lie behind a cut of a group, none of them at work for as long as the
    /// threshold.
    fn has_behind(&self, group: usize, stages: usize) -> bool {
        if stages == 0 {
            return group + 1 == self.grouping.groups.cuts.len();
        }
        let least_s = f64::from(self.task.micro_batches) * self.grouping.behind_s[group] * (1.0 - 1e-9);
        least_s <= stages as f64 * self.threshold_s * self.speed
    }

    /// Whether a stage fits with one stage behind it, but not with so many.
    fn is_tight(&self, behind: u32) -> bool {
        let task = self.task;
        let window = |behind: u32| task.settings.windows(behind + 1, task.micro_batches).0;
        let micro_batches = f64::from(task.micro_batches);
        let every = (task.model.pairs() * self.splits.len()).div_ceil(GUESSED).max(1);
        self.splits.iter().any(|split| {
            let totals = &task.totals[split.share as usize];
            (1..task.model.cuts()).step_by(every).any(|end| {
                task.model.begins(end).any(|begin| {
                    let begin = begin as usize;
                    let work_s = totals.forward_s[end] - totals.forward_s[begin] + totals.backward_s[end]
                        - totals.backward_s[begin];
                    let bytes = |window| {
                        let memory = &task.settings.memory;
                        cost::memory(task.model, totals, memory, (begin, end), split.most, window, task.recompute)
                            .total_bytes()
                    };
                    split.kinds.iter().any(|kind| {
                        micro_batches * work_s < self.threshold_s * kind.speed
                            && bytes(window(1)) <= kind.memory_bytes
                            && bytes(window(behind)) > kind.memory_bytes
                    })
                })
            })
        })
    }

    /// The largest window of all that fits a stage on devices of a kind; 0 if none does.
    fn fitting(&self, split: &Split, kind: &Taken, stage: (usize, usize)) -> u32 {
        let task = self.task;
        let totals = &task.totals[split.share as usize];
        let held = cost::memory(task.model, totals, &task.settings.memory, stage, split.most, 1, task.recompute);
        largest_window(1, task.micro_batches, |window| held.bytes_with(window) <= kind.memory_bytes).unwrap_or(0)
    }

    /// The stages that end at a cut and are at work for less than the threshold on some number of replicas, shortest first.
    fn pairs(&self, end: usize) -> Vec<Pair> {
        let model = self.task.model;
        let mut pairs = Vec::new();
        for (index, begin) in model.begins(end).enumerate() {
            let begin = begin as usize;
            let pair = Pair { least_s: self.least_below_s[end] - self.least_below_s[begin], index, begin };
            if self.is_short_for(&pair, 1.0) {
                pairs.push(pair);
            } else if model.is_chain {
                break;
            }
        }
        pairs.sort_by(|a, b| a.least_s.total_cmp(&b.least_s));
        pairs
    }

    /// Whether a stage may be at work for less than the threshold where layers take so many times their least.
    fn is_short_for(&self, pair: &Pair, slower: f64) -> bool {
        let least_s = f64::from(self.task.micro_batches) * slower * pair.least_s;
        least_s * (1.0 - 1e-9) < self.threshold_s * self.speed
    }

    /// The least of all stages with a split from groups of cuts to one of them.
    fn between(&self, to: usize, split: &Split, ends: &[Ends]) -> Between {
        let task = self.task;
        let (model, micro_batches) = (task.model, f64::from(task.micro_batches));
        let totals = &task.totals[split.share as usize];
        let overlap = task.settings.overlap_sync;
        let mut between = Between::new(to + 1, split);
        let fastest = split.kinds.iter().map(|kind| kind.speed).fold(0.0, f64::max);
        for Ends { end, pairs, inner } in ends {
            let (end, inner) = (*end, inner.as_deref());
            let mut syncs: Vec<Synced<'_>> = (split.rates.iter())
                .map(|&(rate, speed)| Synced::new(model, totals, rate, speed, overlap, end))
                .collect();
            for pair in pairs {
                if !self.is_short_for(pair, split.slower) {
                    break;
                }
                let &Pair { begin, index, .. } = pair;
                let forward_s = totals.forward_s[end] - totals.forward_s[begin];
                let backward_s = totals.backward_s[end] - totals.backward_s[begin];
                let backward_s = if task.recompute { backward_s + forward_s } else { backward_s };
                let is_long = |speed: f64| micro_batches * (forward_s / speed + backward_s / speed) >= self.threshold_s;
                if is_long(fastest) {
                    continue;
                }
                between.looked_at += 1;
                let from = self.grouping.groups.of_cut[begin] as usize;
                between.add(from, forward_s, backward_s);
                for (which, sync) in syncs.iter_mut().enumerate() {
                    between.add_sync(from, which, sync.sum(index, inner));
                }
                for (which, kind) in split.kinds.iter().enumerate() {
                    if !is_long(kind.speed) && between.fitting(from, which) < task.micro_batches {
                        between.add_fitting(from, which, self.fitting(split, kind, (begin, end)));
                    }
                }
            }
        }
        between
    }

    /// The least that stages in front of each cut add, a table for each number of stages behind it, and how much was
    /// looked at, in nanoseconds or so. The next stage has one of its table's windows; the last table stands for all
    /// stages farther in front.
    fn tables(&self, windows: &[(u32, u32)], control: &Control) -> Option<(Vec<Table>, u64)> {
        let task = self.task;
        let groups = self.grouping.groups.cuts.len();
        let (rooms, reach) = (self.rooms, &self.grouping.reach);
        let (lowest, highest) = reach.of_group[0];
        let mut first = vec![usize::MAX; groups * rooms];
        first[..rooms].fill(lowest);
        let mut least = vec![Vec::new(); groups];
        least[0] = vec![Least::EMPTY; (highest + 1 - lowest) * rooms];
        let mut tables = vec![Table { least, first }; windows.len()];
        let deepest = windows.len() - 1;
        // Of a branching model with more stages than are kept, tables know no gradient synchronisation.
        let sets = task.sets.as_ref().filter(|sets| sets.is_kept());
        let mut work = 0;
        for to in 1..groups {
            if control.should_stop() {
                return None;
            }
            let open: Vec<usize> = (0..=deepest.min(self.grouping.layers_behind[to]))
                .filter(|&behind| behind == deepest || self.has_behind(to, behind))
                .collect();
            let ends: Vec<Ends> = (self.grouping.groups.cuts[to].iter())
                .map(|&end| Ends { end, pairs: self.pairs(end), inner: sets.map(|sets| sets.inner(end)) })
                .collect();
            let splits = self.splits.par_iter().with_min_len(self.least_shared);
            let between: Vec<Between> = splits.map(|split| self.between(to, split, &ends)).collect();
            work += FIND * ends.iter().map(|ends| ends.pairs.len() as u64).sum::<u64>();
            let looked = between.iter().map(|between| (PAIR + SUM * between.rates as u64) * between.looked_at);
            work += looked.sum::<u64>();
            let made: Vec<(Vec<Least>, u64)> = (open.par_iter().with_min_len(self.least_shared))
                .map(|&behind| self.row(to, windows[behind], &tables[(behind + 1).min(deepest)], &between))
                .collect();
            let mut rows: Vec<Vec<Least>> = vec![Vec::new(); windows.len()];
            for (&behind, (row, looks)) in open.iter().zip(made) {
                rows[behind] = row;
                work += LOOK * looks;
            }
            self.finish(to, &mut rows, &open);
            let (lowest, highest) = reach.of_group[to];
            let levels = highest + 1 - lowest;
            for (table, row) in tables.iter_mut().zip(rows) {
                for (at, _) in row.iter().enumerate().filter(|(_, entry)| entry.trip_s < f64::INFINITY) {
                    let first = &mut table.first[to * rooms + at / levels];
                    *first = (lowest + at % levels).min(*first);
                }
                table.least[to] = row;
            }
        }
        Some((tables, work))
    }

    /// What stages in front of a group of cuts add, if they end in one `between` groups whose window is in a range and has
    /// `farther` in front of it; and how much was looked at.
    fn row(&self, to: usize, window: (u32, u32), farther: &Table, between: &[Between]) -> (Vec<Least>, u64) {
        let (task, threshold_s, rooms, reach) = (self.task, self.threshold_s, self.rooms, &self.grouping.reach);
        let micro_batches = f64::from(task.micro_batches);
        let is_last = to + 1 == self.grouping.groups.cuts.len();
        let least_bytes =
            self.grouping.groups.cuts[to].iter().map(|&cut| task.cut_bytes[cut]).fold(f64::INFINITY, f64::min);
        let (lowest, highest) = reach.of_group[to];
        let (mut row, mut looks) = (Vec::new(), 0);
        for (split, between) in self.splits.iter().zip(between) {
            let kinds = split.kinds.len();
            for &from in between.some.iter().filter(|&&from| from != to && !farther.least[from].is_empty()) {
                let (lowest_front, highest_front) = reach.of_group[from];
                for (which, kind) in split.kinds.iter().enumerate() {
                    let forward_s = between.forward_s[from] / kind.speed;
                    let backward_s = between.backward_s[from] / kind.speed;
                    let all_s = micro_batches * (forward_s + backward_s);
                    let largest = window.1.min(between.fitting(from, which));
                    if all_s >= threshold_s || largest < window.0 {
                        continue;
                    }
                    for (at, way) in split.ways.iter().enumerate() {
                        if is_last && way.behind > 0 {
                            continue; // nothing is behind
                        }
                        // With fewer there are too few for the stages in front.
                        let enough = kind.with_rest(farther.first[from * rooms + way.own]).max(lowest);
                        if enough > highest {
                            continue;
                        }
                        looks += (highest + 1 - enough) as u64;
                        let sync_s = between.sync_s(from, split.rate_of[at * kinds + which]);
                        let front = &farther.least[from][reach.entry(from, way.own, lowest_front)..];
                        let before = |rest: usize| &front[rest.min(highest_front) - lowest_front];
                        // The stage's gradients are summed while earlier stages drain. More devices make no stages in
                        // front take longer.
                        let is_long = |&rest: &usize| {
                            let before = before(rest);
                            all_s + greater(before.trip_s, before.fill_s + sync_s) >= threshold_s
                        };
                        let rests = &kind.rests[enough - kind.first..=highest - kind.first];
                        // Often it is all of them, or none.
                        if rests.last().is_none_or(is_long) {
                            continue;
                        }
                        let long = if is_long(&rests[0]) { rests.partition_point(is_long) } else { 0 };
                        let Rate { s_per_byte, latency_s } = way.transfer;
                        let transfer_s = if is_last { 0.0 } else { least_bytes * s_per_byte + latency_s };
                        let stage =
                            FrontStage::new(forward_s, backward_s, sync_s, transfer_s, largest, task.micro_batches);
                        row.resize((highest + 1 - lowest) * rooms, Least::NONE);
                        let start = reach.entry(to, way.behind, enough);
                        let entries = &mut row[start + long..start + rests.len()];
                        for (entry, &rest) in entries.iter_mut().zip(&rests[long..]) {
                            entry.lower(&stage, before(rest));
                        }
                    }
                }
            }
        }
        (row, looks)
    }

    /// Ends the entries of a group, given those of stages that begin in earlier ones, in each table; none that reaches the
    /// threshold stays.
    fn finish(&self, to: usize, rows: &mut [Vec<Least>], open: &[usize]) {
        let (lowest, highest) = self.grouping.reach.of_group[to];
        let levels = highest + 1 - lowest;
        for row in rows.iter_mut() {
            for at in 2 * levels..row.len() {
                row[at] = row[at].or(&row[at - levels]); // more room never harms
            }
        }
        // A stage inside a group is left out, with its devices: there is one stage more behind those in front of it, which
        // may lie anywhere.
        if self.grouping.groups.cuts[to].len() > 1 {
            let deepest = rows.len() - 1;
            for &behind in open.iter().rev().filter(|&&behind| behind < deepest) {
                let (nearer, farther) = rows.split_at_mut(behind + 1);
                let (row, farther) = (&mut nearer[behind], &farther[0]);
                if farther.is_empty() {
                    continue;
                }
                row.resize(levels * self.rooms, Least::NONE);
                for (at, entry) in row.iter_mut().enumerate() {
                    let level = at % levels;
                    *entry = entry.or(&farther[level]).or(&farther[(self.rooms - 1) * levels + level]);
                }
            }
        }
        let behind_s = self.grouping.behind_s[to] / self.speed * (1.0 - 1e-9);
        for entry in rows.iter_mut().flatten().filter(|entry| entry.least_s(behind_s) >= self.threshold_s) {
            *entry = Least::NONE;
        }
    }
}

/// What each layer takes for one micro-batch at speed 1, with one of the task's totals.
fn layers_s(task: &Task<'_>, totals: &Totals) -> Vec<f64> {
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let both = totals.layer_forward_s.iter().zip(&totals.layer_backward_s);
    both.map(|(forward_s, backward_s)| forwards * forward_s + backward_s).collect()
}

/// For each layer the least that a micro-batch takes, times its replicas.
fn least_work_s(task: &Task<'_>) -> Vec<f64> {
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let splits: Vec<(f64, &Totals)> = (task.share.iter().zip(0_u32..))
        .filter_map(|(share, replicas)| share.map(|share| (f64::from(replicas), &task.totals[share as usize])))
        .collect();
    (0..task.model.layer_parameter_bytes.len())
        .map(|layer| {
            (splits.iter())
                .map(|(replicas, t)| replicas * (forwards * t.layer_forward_s[layer] + t.layer_backward_s[layer]))
                .fold(f64::INFINITY, f64::min)
        })
        .collect()
}

/// No plan has a shorter step, as far as tables below a threshold say; what making them took.
pub(super) fn tabled_s(task: &Task<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    Prefixes::with(task, links, threshold_s, usize::MAX, ALONE, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work))
}

/// No plan has a shorter step: as many devices as are of use, the fastest, at work all the time.
pub(super) fn busy_s(task: &Task<'_>) -> f64 {
    let mut machines: Vec<(f64, u32)> = task.cluster.machines.iter().map(|m| (m.speed, m.devices)).collect();
    machines.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut speed, mut devices) = (0.0, task.most_devices());
    for (each, of_machine) in machines {
        let some = devices.min(of_machine);
        speed += f64::from(some) * each;
        devices -= some;
    }
    f64::from(task.micro_batches) * least_work_s(task).iter().sum::<f64>() / speed
}

/// No plan has a shorter step: all devices at work all the time, or one micro-batch on its way through; what finding that
/// took.
///
/// Steps of `threshold_s` and more don't count; nor does the micro-batch on its way if time is up.
pub(super) fn least_step_s(task: &Task<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    let busy_s = busy_s(task);
    if busy_s >= threshold_s {
        return (busy_s, 0);
    }
    let (alone_s, spent) = Prefixes::new(task, links, threshold_s, 0, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work));
    (alone_s.max(busy_s), spent)
}
