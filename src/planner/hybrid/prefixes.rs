//! The least that any stages in front of a cut add to the paths of a suffix, were every stage placed at its best.
//!
//! One relaxed pass over cuts and numbers of devices, from the first cut to the last. Of machines it only knows how much
//! room is left on that of the stage behind a cut, if that stage lies in one: each stage gets the best links that
//! [`Links`] leaves it. Devices that differ are counted in [`Units`]: a stage is of a kind, and takes what its devices
//! count at least. Each table below is the least of its own, so together they never exceed what a real plan adds.

use super::groups::Groups;
use super::kinds::{Kind, Units, kinds};
use super::links::{Links, least};
use super::paths::Paths;
use super::settings::largest_window;
use super::smaller::{Inner, Sets};
use super::task::Task;
use crate::control::Control;
use crate::cost::network::Rate;
use crate::cost::{self, Model, SyncTail, Totals};

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
/// Entries that all tables have at most.
const MOST_ENTRIES: usize = 3_000_000;
/// Numbers of replicas this far apart, at most, count as one: the first that makes the tables small enough.
const APART: [f64; 8] = [1.0, 1.07, 1.15, 1.3, 1.6, 2.5, 6.0, 40.0];
/// What it takes to look at one of them, in nanoseconds or so.
const LOOK: u64 = 8;
/// What it takes to look at a stage between two cuts, with one split, in nanoseconds or so.
const PAIR: u64 = 30;
/// What it takes to find a smaller stage of a branching model, likewise.
const SET: u64 = 100;
/// Stages that are looked at to guess the work.
const GUESSED: usize = 30_000;
/// Groups of cuts that are told apart, if not each cut, and stages that a plan is thought to have at most.
const GROUPS: [usize; 3] = [192, 96, 48];
const MOST_STAGES: u32 = 16;
/// Stages of a branching model up to which the tables know gradient synchronisation.
const MOST_SYNCED: usize = 4_000_000;

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

/// Names of [`Least::sums_s`].
#[cfg(test)]
pub(super) const SUMS: [&str; 8] = ["trip", "syncs", "fill", "backwards", "forwards", "starts", "waits", "both"];

/// What a stage in front of a cut, and its transfer to the stage behind it, do to each of them.
struct FrontStage {
    trip_s: f64,
    fill_s: f64,
    others_forward_s: f64,
    others_backward_s: f64,
    sync_s: f64,
    wait_s: f64,
    both_s: f64,
}

impl FrontStage {
    fn new(forward_s: f64, backward_s: f64, sync_s: f64, transfer_s: f64, window: u32, micro_batches: u32) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(window - 1);
        let work_s = forward_s + backward_s;
        Self {
            trip_s: work_s + 2.0 * transfer_s,
            fill_s: forward_s + transfer_s,
            others_forward_s: (count - 1.0) * forward_s,
            others_backward_s: (count - 1.0) * backward_s,
            sync_s,
            wait_s: 2.0 * transfer_s + count * work_s - skipped * forward_s,
            both_s: if window < micro_batches {
                4.0 * transfer_s + (count - skipped) * work_s
            } else {
                f64::NEG_INFINITY
            },
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
        let above = |path_s: f64| path_s + stage.trip_s;
        let from_here = above(before.trip_s);
        let started_s = before.fill_s + stage.fill_s + stage.others_forward_s;
        let lower = |value: &mut f64, other: f64| *value = value.min(other);
        lower(&mut self.trip_s, from_here);
        lower(&mut self.fill_s, before.fill_s + stage.fill_s);
        lower(&mut self.backwards_s, above(before.backwards_s).max(from_here + stage.others_backward_s));
        lower(&mut self.forwards_s, above(before.forwards_s).max(from_here + stage.others_forward_s));
        lower(&mut self.starts_s, (before.starts_s + stage.fill_s).max(started_s));
        lower(&mut self.syncs_s, above(before.syncs_s).max(above(before.fill_s) + stage.sync_s));
        // The way back up to one of the stages, or to this one, and the synchronisation of that one.
        let synced_s = before.syncs_s.max(before.fill_s + stage.sync_s);
        lower(&mut self.waits_s, above(before.waits_s).max(synced_s + stage.wait_s));
        lower(&mut self.both_s, (before.both_s + 2.0 * stage.trip_s).max(synced_s + stage.both_s));
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
    groups: Groups,
    reach: Reach,
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
    fn new(task: &Task<'_>, units: &Units, groups: &Groups, threshold_s: f64, most_levels: u32) -> Self {
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
        let work_s = least_work_s(task);
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
        let below_s = task.model.sums_below(&work_s);
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
    groups: Groups,
    reach: Reach,
    /// For each group of cuts, what a micro-batch takes behind one at least.
    behind_s: Vec<f64>,
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
        self.first + self.rests.partition_point(|&rest| rest < least)
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
                _ => splits.push(Self { share, fewest: count, most: count, kinds: Vec::new(), ways: Vec::new() }),
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

/// What summing gradients adds to a stage that grows towards the input, at one rate and behind backwards of one speed.
struct Synced<'a> {
    rate: Rate,
    speed: f64,
    tail: SyncTail<'a>,
    /// In a branching model, that of each stage that has been looked at, in the order of [`Model::begins`].
    of_begin: Vec<f64>,
}

/// What there is to sum, at one rate, of every stage that ends at a cut, in the order of [`Model::begins`].
#[cfg(test)]
pub(super) fn sums_s(model: &Model, totals: &Totals, rate: Rate, overlap: bool, end: usize) -> Vec<f64> {
    let tail = SyncTail::new(model, totals, 1.0, rate, overlap);
    let mut sync = Synced { rate, speed: 1.0, tail, of_begin: Vec::new() };
    let inner = Sets::new(model).inner(end);
    (0..model.begins(end).count()).map(|index| sync.sum(&inner, index)).collect()
}

/// The least of stages with one split from each group of cuts to another one.
struct Between {
    /// Groups that some stage begins in.
    some: Vec<usize>,
    /// At speed 1, for each group.
    forward_s: Vec<f64>,
    backward_s: Vec<f64>,
    /// At each of these rates, behind backwards of these speeds.
    rates: Vec<(Rate, f64)>,
    syncs_s: Vec<f64>,
    /// The largest window, for each kind.
    kinds: usize,
    fitting: Vec<u32>,
}

impl Between {
    fn new(groups: usize, rates: Vec<(Rate, f64)>, split: &Split) -> Self {
        Self {
            some: Vec::new(),
            forward_s: vec![f64::INFINITY; groups],
            backward_s: vec![f64::INFINITY; groups],
            syncs_s: vec![f64::INFINITY; groups * rates.len()],
            rates,
            kinds: split.kinds.len(),
            fitting: vec![0; groups * split.kinds.len()],
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
        let least_s = &mut self.syncs_s[from * self.rates.len() + which];
        *least_s = least_s.min(sync_s);
    }

    fn sync_s(&self, from: usize, rate: Rate, speed: f64) -> f64 {
        let is = |known: &(Rate, f64)| known.0 == rate && known.1.total_cmp(&speed).is_eq();
        self.rates.iter().position(is).map_or(0.0, |which| self.syncs_s[from * self.rates.len() + which])
    }

    fn fitting(&self, from: usize, which: usize) -> u32 {
        self.fitting[from * self.kinds + which]
    }

    fn add_fitting(&mut self, from: usize, which: usize, window: u32) {
        let most = &mut self.fitting[from * self.kinds + which];
        *most = window.max(*most);
    }
}

impl<'a> Synced<'a> {
    /// Of a stage without layers that ends at another cut.
    fn begin(&mut self, model: &'a Model, totals: &'a Totals, overlap: bool) {
        self.tail = SyncTail::new(model, totals, self.speed, self.rate, overlap);
        self.of_begin.clear();
    }

    /// Over the layers between two cuts, the first of which is so many-th in the order of [`Model::begins`].
    fn sum(&mut self, inner: &Inner, index: usize) -> f64 {
        let (smaller, from, to) = inner.smaller[index];
        let left_s = self.of_begin.get(smaller).copied().unwrap_or(0.0);
        let sync_s = self.tail.behind(left_s, inner.behind[from..to].iter().copied());
        self.of_begin.resize(index, 0.0);
        self.of_begin.push(sync_s);
        sync_s
    }
}

impl Synced<'_> {
    fn is(&self, rate: Rate, speed: f64) -> bool {
        self.rate == rate && self.speed.total_cmp(&speed).is_eq()
    }
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
            groups: Groups::default(),
            reach: Reach::default(),
            behind_s: Vec::new(),
        };
        let work = sources.choose(links, detail, most_behind > 0);
        let entries = sources.reach.entries * sources.rooms;
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
        let (work_s, count) = (least_work_s(task), f64::from(task.micro_batches));
        let busy_s = (0..model.cuts())
            .map(|cut| count * model.layers_between(0, cut).map(|layer| work_s[layer as usize]).sum::<f64>())
            .collect();
        Some(Self { groups: sources.groups, reach: sources.reach, rooms: sources.rooms, least, busy_s, work: spent })
    }

    fn at(&self, cut: usize, free: u32, room: Option<u32>, behind: u32) -> &Least {
        let room = room.map_or(0, |room| 1 + room as usize).min(self.rooms - 1);
        let table = &self.least[(behind as usize).min(self.least.len() - 1)];
        let level = self.reach.level(free);
        let group = self.groups.of_cut[cut] as usize;
        if level < self.reach.of_group[group].0 {
            &Least::NONE
        } else {
            table.least[group].get(self.reach.entry(group, room, level)).unwrap_or(&Least::NONE)
        }
    }

    /// The least that any plan takes from its first forward to its last backward.
    pub(super) fn least_s(&self) -> f64 {
        let whole = self.groups.of_cut.len() - 1;
        let last = self.at(whole, u32::MAX, None, 0);
        last.trip_s.max(last.backwards_s).max(last.forwards_s)
    }

    /// The least that stages in front of a cut add to one micro-batch on its way through, with so many stages behind it,
    /// so many devices free, and room for so many on the machine of the stage next to the cut, if it lies in one;
    /// infinite if none fit.
    pub(super) fn trip_s(&self, cut: usize, free: u32, room: Option<u32>, behind: u32) -> f64 {
        self.at(cut, free, room, behind).trip_s
    }

    /// No plan is shorter whose stages in front of a cut have devices that do so much together, against one of speed 1.
    pub(super) fn busy_s(&self, cut: usize, free_speed: f64) -> f64 {
        if cut == 0 { 0.0 } else { self.busy_s[cut] / free_speed * (1.0 - 1e-12) }
    }

    /// No plan that ends in a suffix with these paths is shorter.
    pub(super) fn bound_s(&self, paths: &Paths, cut: usize, free: u32, room: Option<u32>, behind: u32) -> f64 {
        self.at(cut, free, room, behind).sums_s(paths).into_iter().fold(f64::NEG_INFINITY, f64::max)
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
        let mut work;
        loop {
            let mut is_other = true;
            if let Some((_, most, apart)) = tried.next() {
                is_other = self.groups.most != most;
                if is_other {
                    self.groups = Groups::new(self.task.model, &least_work_s(self.task), most);
                    self.behind_s = self.behind_s();
                }
                self.splits = Split::all(self.task, &self.kinds, apart);
            } else {
                most_levels /= 2;
            }
            if is_other {
                self.reach = Reach::new(self.task, &self.units, &self.groups, self.threshold_s, most_levels);
            }
            for split in &mut self.splits {
                let levels = &self.reach.levels;
                for kind in &mut split.kinds {
                    kind.first = levels.partition_point(|&level| level < kind.units);
                    let enough = levels[kind.first..].iter();
                    kind.rests = enough.map(|&level| self.reach.level(level - kind.units)).collect();
                }
            }
            work = self.work();
            if work <= detail.work || (tried.len() == 0 && most_levels <= FEWEST_LEVELS) {
                break;
            }
        }
        let cases = links.widest as usize + 2;
        let rise = (1 + cases / 2) as f64;
        if has_rooms && links.machines > 1 && work * rise <= detail.work && self.reach.entries * cases <= MOST_ENTRIES {
            self.rooms = cases;
            work *= rise;
        }
        for split in &mut self.splits {
            split.ways = split.ways(links, self.rooms);
        }
        work
    }

    /// About how many stages, with numbers of devices in front of them, a table looks at.
    fn work(&self) -> f64 {
        let (model, groups) = (self.task.model, &self.groups.cuts);
        let every = (groups.len().pow(2) / 2 * self.splits.len()).div_ceil(GUESSED).max(1);
        let mut work = 0;
        for to in (1..groups.len()).rev().step_by(every) {
            let (lowest, highest) = self.reach.of_group[to];
            let end = groups[to][0];
            for split in &self.splits {
                let totals = &self.task.totals[split.share as usize];
                for kind in split.kinds.iter().filter(|kind| kind.first.max(lowest) <= highest) {
                    for from in (0..to).rev() {
                        let begin = groups[from][groups[from].len() - 1];
                        if self.is_short(totals, kind.speed, begin, end) {
                            let needed = kind.with_rest(self.reach.of_group[from].0);
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

    /// For each group of cuts, what a micro-batch takes behind one, each layer with the split that is best for it.
    fn behind_s(&self) -> Vec<f64> {
        let task = self.task;
        let forwards = if task.recompute { 2.0 } else { 1.0 };
        let layers = task.model.layer_parameter_bytes.len();
        let least_s: Vec<f64> = (0..layers)
            .map(|layer| {
                let each = task.totals.iter().map(|t| forwards * t.layer_forward_s[layer] + t.layer_backward_s[layer]);
                each.fold(f64::INFINITY, f64::min)
            })
            .collect();
        let below_s = task.model.sums_below(&least_s);
        let whole_s = below_s[below_s.len() - 1];
        let most_below_s = |cuts: &Vec<usize>| cuts.iter().map(|&cut| below_s[cut]).fold(0.0, f64::max);
        self.groups.cuts.iter().map(|cuts| whole_s - most_below_s(cuts)).collect()
    }

    /// The speed at which gradients of a kind's stage are summed behind its backward. The lowest of all hides the most:
    /// it stands for each where a sum goes through many layers, and where kinds aren't told apart.
    fn summing(&self, kind: &Taken) -> f64 {
        let is_own = self.task.model.is_chain && self.kinds.len() > 1;
        if is_own { kind.speed } else { self.slowest }
    }

    /// What there is to sum of a stage without layers, each at another rate or speed.
    fn syncs(&self, split: &Split) -> Vec<Synced<'_>> {
        let totals = &self.task.totals[split.share as usize];
        let mut syncs: Vec<Synced<'_>> = Vec::new();
        for (way, kind) in split.ways.iter().flat_map(|way| split.kinds.iter().map(move |kind| (way, kind))) {
            let (rate, speed) = (way.sync, self.summing(kind));
            if syncs.iter().all(|known| !known.is(rate, speed)) {
                let tail = SyncTail::new(self.task.model, totals, speed, rate, self.task.settings.overlap_sync);
                syncs.push(Synced { rate, speed, tail, of_begin: Vec::new() });
            }
        }
        syncs
    }

    /// Whether so many stages may lie behind a cut of a group, none of them at work for as long as the threshold.
    fn has_behind(&self, group: usize, stages: usize) -> bool {
        if stages == 0 {
            return group + 1 == self.groups.cuts.len();
        }
        let least_s = f64::from(self.task.micro_batches) * self.behind_s[group] * (1.0 - 1e-9);
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
        let bytes = |window| {
            cost::memory(task.model, totals, &task.settings.memory, stage, split.most, window, task.recompute)
                .total_bytes()
        };
        largest_window(1, task.micro_batches, |window| bytes(window) <= kind.memory_bytes).unwrap_or(0)
    }

    /// The least of all stages with a split from groups of cuts to one of them; what looking at them took.
    fn between(&self, to: usize, split: &Split, inner: Option<&[Inner]>) -> (Between, u64) {
        let task = self.task;
        let (model, micro_batches) = (task.model, f64::from(task.micro_batches));
        let totals = &task.totals[split.share as usize];
        let mut syncs = self.syncs(split);
        let mut between = Between::new(to + 1, syncs.iter().map(|sync| (sync.rate, sync.speed)).collect(), split);
        let fastest = split.kinds.iter().map(|kind| kind.speed).fold(0.0, f64::max);
        let mut looked_at = 0;
        for (at, &end) in self.groups.cuts[to].iter().enumerate() {
            let mut begun = end;
            for sync in &mut syncs {
                sync.begin(model, totals, task.settings.overlap_sync);
            }
            for (index, begin) in model.begins(end).enumerate() {
                let begin = begin as usize;
                let forward_s = totals.forward_s[end] - totals.forward_s[begin];
                let backward_s = totals.backward_s[end] - totals.backward_s[begin];
                let backward_s = if task.recompute { backward_s + forward_s } else { backward_s };
                let is_long = |speed: f64| micro_batches * (forward_s / speed + backward_s / speed) >= self.threshold_s;
                if is_long(fastest) {
                    if model.is_chain {
                        break;
                    }
                    continue;
                }
                looked_at += 1;
                let from = self.groups.of_cut[begin] as usize;
                between.add(from, forward_s, backward_s);
                for (which, sync) in syncs.iter_mut().enumerate() {
                    let sync_s = if model.is_chain {
                        sync.tail.extend(model.layers_between(begin, begun))
                    } else if let Some(inner) = inner {
                        sync.sum(&inner[at], index)
                    } else {
                        0.0
                    };
                    between.add_sync(from, which, sync_s);
                }
                begun = begin;
                for (which, kind) in split.kinds.iter().enumerate() {
                    if !is_long(kind.speed) && between.fitting(from, which) < task.micro_batches {
                        between.add_fitting(from, which, self.fitting(split, kind, (begin, end)));
                    }
                }
            }
        }
        (between, looked_at)
    }

    /// The least that stages in front of each cut add, a table for each number of stages behind it, and how much was
    /// looked at, in nanoseconds or so. The next stage has one of its table's windows; the last table stands for all
    /// stages farther in front.
    fn tables(&self, windows: &[(u32, u32)], control: &Control) -> Option<(Vec<Table>, u64)> {
        let task = self.task;
        let (model, threshold_s) = (task.model, self.threshold_s);
        let micro_batches = f64::from(task.micro_batches);
        let groups = self.groups.cuts.len();
        let (rooms, reach) = (self.rooms, &self.reach);
        let (lowest, highest) = reach.of_group[0];
        let mut first = vec![usize::MAX; groups * rooms];
        first[..rooms].fill(lowest);
        let mut least = vec![Vec::new(); groups];
        least[0] = vec![Least::EMPTY; (highest + 1 - lowest) * rooms];
        let mut tables = vec![Table { least, first }; windows.len()];
        let deepest = windows.len() - 1;
        let sets = (!model.is_chain && model.pairs() <= MOST_SYNCED).then(|| Sets::new(model));
        let mut work = 0;
        for to in 1..groups {
            if control.should_stop() {
                return None;
            }
            let is_last = to + 1 == groups;
            let least_bytes = self.groups.cuts[to].iter().map(|&cut| task.cut_bytes[cut]).fold(f64::INFINITY, f64::min);
            let bytes_between = if is_last { 0.0 } else { least_bytes };
            let (lowest, highest) = reach.of_group[to];
            let levels = highest + 1 - lowest;
            let open: Vec<usize> =
                (0..=deepest).filter(|&behind| behind == deepest || self.has_behind(to, behind)).collect();
            let mut rows: Vec<Vec<Least>> = vec![Vec::new(); windows.len()];
            let inner: Option<Vec<Inner>> =
                sets.as_ref().map(|sets| self.groups.cuts[to].iter().map(|&end| sets.inner(end)).collect());
            work += SET * inner.iter().flatten().map(|inner| inner.smaller.len() as u64).sum::<u64>();
            for split in &self.splits {
                let (between, pairs) = self.between(to, split, inner.as_deref());
                work += if inner.is_some() || model.is_chain { PAIR } else { LOOK } * pairs;
                for &from in &between.some {
                    for (which, kind) in split.kinds.iter().enumerate() {
                        let forward_s = between.forward_s[from] / kind.speed;
                        let backward_s = between.backward_s[from] / kind.speed;
                        let all_s = micro_batches * (forward_s + backward_s);
                        if all_s >= threshold_s {
                            continue;
                        }
                        let (fitting, speed) = (between.fitting(from, which), self.summing(kind));
                        for way in &split.ways {
                            if is_last && way.behind > 0 {
                                continue; // nothing is behind
                            }
                            let Rate { s_per_byte, latency_s } = way.transfer;
                            let transfer_s = if is_last { 0.0 } else { bytes_between * s_per_byte + latency_s };
                            let sync_s = between.sync_s(from, way.sync, speed);
                            for &behind in &open {
                                let window = windows[behind].1.min(fitting);
                                let farther = &tables[(behind + 1).min(deepest)];
                                let front = &farther.least[from];
                                if window < windows[behind].0 || front.is_empty() || from == to {
                                    continue;
                                }
                                let stage = FrontStage::new(
                                    forward_s,
                                    backward_s,
                                    sync_s,
                                    transfer_s,
                                    window,
                                    task.micro_batches,
                                );
                                // With fewer there are too few for the stages in front.
                                let enough = kind.with_rest(farther.first[from * rooms + way.own]).max(lowest);
                                work += LOOK * (highest + 1).saturating_sub(enough) as u64;
                                let row = &mut rows[behind];
                                for level in enough..=highest {
                                    let before = &front[reach.entry(from, way.own, kind.rests[level - kind.first])];
                                    // The stage's gradients are summed while earlier stages drain.
                                    if all_s + before.trip_s.max(before.fill_s + sync_s) < threshold_s {
                                        row.resize(levels * rooms, Least::NONE);
                                        row[reach.entry(to, way.behind, level)].lower(&stage, before);
                                    }
                                }
                            }
                        }
                    }
                }
            }
            self.finish(to, &mut rows, &open);
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

    /// Ends the entries of a group, given those of stages that begin in earlier ones, in each table; none that reaches the
    /// threshold stays.
    fn finish(&self, to: usize, rows: &mut [Vec<Least>], open: &[usize]) {
        let (lowest, highest) = self.reach.of_group[to];
        let levels = highest + 1 - lowest;
        for row in rows.iter_mut() {
            for at in 2 * levels..row.len() {
                row[at] = row[at].or(&row[at - levels]); // more room never harms
            }
        }
        // A stage inside a group is left out, with its devices: there is one stage more behind those in front of it, which
        // may lie anywhere.
        if self.groups.cuts[to].len() > 1 {
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
        let behind_s = self.behind_s[to] / self.speed * (1.0 - 1e-9);
        for entry in rows.iter_mut().flatten().filter(|entry| entry.least_s(behind_s) >= self.threshold_s) {
            *entry = Least::NONE;
        }
    }
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
    let last = task.model.cuts() - 1;
    Prefixes::with(task, links, threshold_s, usize::MAX, ALONE, control)
        .map_or((0.0, 0), |prefixes| (prefixes.bound_s(&Paths::default(), last, u32::MAX, None, 0), prefixes.work))
}

/// No plan has a shorter step: all devices at work all the time, or one micro-batch on its way through.
///
/// Steps of `threshold_s` and more don't count; nor does the micro-batch on its way if time is up.
pub(super) fn least_step_s(task: &Task<'_>, links: &Links, threshold_s: f64, control: &Control) -> f64 {
    let last = task.model.cuts() - 1;
    let alone_s = Prefixes::new(task, links, threshold_s, 0, control)
        .map_or(0.0, |prefixes| prefixes.bound_s(&Paths::default(), last, u32::MAX, None, 0));
    let speed: f64 = task.cluster.machines.iter().map(|m| f64::from(m.devices) * m.speed).sum();
    let work_s: f64 = least_work_s(task).iter().sum();
    alone_s.max(f64::from(task.micro_batches) * work_s / speed)
}
