//! Lemma *The relaxed space has a counterpart of every plan* (docs/proofs.md#links-of-any-placement): one with the same
//! cuts, replicas and numbers in flight, none of whose paths through the schedule is longer. So the bound of a pass of
//! the label search over this space holds for every plan.
//!
//! Stages are placed from the last one to the first. A *situation* stores how many devices are free, how many the stage
//! placed last has, and whether this stage is on one node, with how many devices free beside it. A *move* places the
//! stage in front of it: on the same node, on another node, or spread over several nodes. The cost of a move is the
//! smallest over all placements of both stages ([`Links`]). The space gives bounds, and no plans.
//!
//! A *class* has all devices with at least some speed and memory, so a fast device is in the classes of slower ones,
//! too ([`DeviceClass`]). The free devices of each class are counted separately. A move lowers the counts of its own
//! class and of those that contain it, as if it took no faster devices. So no count is below that of a real placement.

use crate::planner::effort::{passes, tables};
use crate::planner::hybrid::{
    bounds::{
        device_classes::{DeviceClass, Units, device_classes},
        link_bounds::{Links, Span, Spread, joined},
    },
    placement::placement_space::{CostClasses, PlacementMove, Placements},
    subproblem::Subproblem,
};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::cost::Pace;
use crate::cost::network::Rate;

/// The stage placed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Last {
    /// No stage is placed yet.
    Nothing,
    /// The stage is on one node of this class, with this number of free devices beside it.
    One { span: Span, class: u16, free_devices: u32 },
    /// The stage is spread over several nodes.
    Spread(Spread),
}

/// How far ranges of replica counts are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ranges {
    /// Counts that give about the same samples are one range, so that a large cluster has few moves.
    Joined,
    /// A range has all counts with which the largest share of a micro-batch has the same number of samples.
    OfSamples,
    /// No range ends much above its smallest count.
    Split,
}

/// Number of free devices of each class.
type Free = [u32; tables::MAX_DEVICE_CLASSES];

/// Situations that the search has reached, and moves between them.
pub(crate) struct Relaxed {
    links: Links,
    /// Ranges of replica counts, each of which is one move.
    spans: Vec<Span>,
    ranges: Ranges,
    /// Classes of devices. The first one has all devices.
    classes: Vec<DeviceClass>,
    /// Whole numbers, about in proportion to speed, as which devices count in the prefix tables.
    units: Units,
    /// Number of devices that a plan can use, since each stage has at least one layer.
    max_devices: u32,
    /// Free devices of each situation, and the index of the stage placed last in `lasts`.
    situations: Vec<(Free, u32)>,
    index: FxHashMap<(Free, u32), u32>,
    lasts: Vec<Last>,
    last_index: FxHashMap<Last, u32>,
    moves: FxHashMap<u32, Arc<[PlacementMove]>>,
    /// Gradient all-reduce rates of spread stages, kept because many moves have the same one.
    sums: FxHashMap<Spread, Rate>,
    /// Numbers of the combinations that decide the time and memory of a stage, so that passes compute them once.
    cost_classes: CostClasses,
}

impl Relaxed {
    /// Returns the space with situation 0, in which all devices are free, and at most about `max_ranges` ranges of
    /// replica counts.
    pub(crate) fn new(task: &Subproblem<'_>, max_ranges: usize) -> Self {
        let classes = device_classes(task.cluster);
        let links = Links::new(task, false);
        // A move costs what the largest count of its range costs. That is the least only if no smaller share costs more.
        let max_ranges = if task.grows_with_shares() { max_ranges } else { usize::MAX };
        let spans = joined(&links.spans, max_ranges);
        let mut space = Self {
            ranges: if spans.len() < links.spans.len() { Ranges::Joined } else { Ranges::OfSamples },
            spans,
            links,
            situations: Vec::new(),
            index: FxHashMap::default(),
            lasts: vec![Last::Nothing],
            last_index: FxHashMap::default(),
            moves: FxHashMap::default(),
            sums: FxHashMap::default(),
            cost_classes: CostClasses::default(),
            max_devices: task.max_devices(),
            units: Units::new(task.cluster),
            classes,
        };
        let mut free = [0; tables::MAX_DEVICE_CLASSES];
        free.iter_mut().zip(&space.classes).for_each(|(free, class)| *free = class.devices);
        space.situation((free, 0));
        space
    }

    /// Splits ranges of replicas, which may raise the bound of further passes. Situations that were reached stay valid.
    pub(crate) fn refine(&mut self) {
        (self.ranges, self.spans) = match self.ranges {
            Ranges::Joined => (Ranges::OfSamples, self.links.spans.clone()),
            _ => (Ranges::Split, self.links.spans.iter().flat_map(|&span| parts(span)).collect()),
        };
        self.moves.clear();
    }

    /// Returns whether ranges have counts with other samples.
    pub(crate) fn has_joined_ranges(&self) -> bool {
        self.ranges == Ranges::Joined
    }

    /// Returns whether refining would split this range of replicas.
    pub(crate) fn is_joined(&self, span: Span) -> bool {
        match self.ranges {
            Ranges::Joined => !self.links.spans.contains(&span) || parts(span).nth(1).is_some(),
            Ranges::OfSamples => parts(span).nth(1).is_some(),
            Ranges::Split => false,
        }
    }

    /// Returns the index of a stage placed last.
    fn last(&mut self, last: Last) -> u32 {
        let next = self.lasts.len() as u32;
        let lasts = &mut self.lasts;
        *self.last_index.entry(last).or_insert_with(|| {
            lasts.push(last);
            next
        })
    }

    /// Returns every move that puts a stage in front of this one, fewest devices first.
    fn moves_before(&mut self, behind: Last) -> Arc<[PlacementMove]> {
        let mut moves = Vec::new();
        for span in self.spans.clone() {
            if span.0 > self.max_devices {
                break; // Ranges are sorted, so all that follow are too large as well.
            }
            for at in 0..self.classes.len() {
                let class = self.classes[at].clone();
                let mut add = |space: &mut Self, transfer: Rate, sync: Rate, last: Last| {
                    // A range takes the devices of its smallest count and has the links of its largest, so it costs no
                    // more than any count in it.
                    moves.push(PlacementMove {
                        next: space.last(last),
                        replicas: span.1,
                        fewest: span.0,
                        device_class: at as u16,
                        transfer,
                        sync,
                        pace: Pace::at_speed(class.speed),
                        memory_bytes: class.memory_bytes,
                        cost_class: space.cost_classes.of(
                            span.1,
                            sync,
                            Pace::at_speed(class.speed),
                            class.memory_bytes,
                        ),
                        free_on_node: if let Last::One { free_devices, .. } = last { Some(free_devices) } else { None },
                        takes: Vec::new(), // The space does not know which nodes a stage is on.
                    });
                };
                if let Some(widest) = class.widest.filter(|&widest| span.0 <= widest) {
                    let sync = self.links.all_reduce_in_one(span);
                    let one = |free_devices| Last::One { span, class: at as u16, free_devices };
                    let alone = one(widest - span.0);
                    match behind {
                        Last::Nothing => add(self, Rate::default(), sync, alone),
                        Last::One { span: other, class: other_class, free_devices } => {
                            // The devices of a node are alike, so two stages on it have the same class.
                            if other_class == at as u16 && span.0 <= free_devices {
                                add(self, self.links.beside(span, other), sync, one(free_devices - span.0));
                            }
                            if self.links.nodes > 1 {
                                add(self, self.links.apart(), sync, alone);
                            }
                        }
                        Last::Spread(other) => add(self, self.links.one_and_spread(span, other), sync, alone),
                    }
                }
                for own in self.links.spreads(span) {
                    let transfer = match behind {
                        Last::Nothing => Rate::default(),
                        Last::One { span: other, .. } => self.links.one_and_spread(other, own),
                        Last::Spread(other) => self.links.both_spread(own, other),
                    };
                    let sync = *self.sums.entry(own).or_insert_with(|| self.links.all_reduce_spread(own));
                    add(self, transfer, sync, Last::Spread(own));
                }
            }
        }
        moves.into()
    }
}

/// Splits a range of replicas into parts. The largest count of a part is at most 1 / [`passes::FINE_RANGE`] above the
/// smallest.
///
/// A stage takes the smallest number of devices of its part, but has as many network ports as the largest. So narrow
/// parts give a better bound.
fn parts((min, max): Span) -> impl Iterator<Item = Span> {
    let part = move |min_replicas: u32| (min_replicas, (min_replicas + min_replicas / passes::FINE_RANGE).min(max));
    std::iter::successors(Some(part(min)), move |last| (last.1 < max).then(|| part(last.1 + 1)))
}

impl Placements for Relaxed {
    const IS_REAL: bool = false;

    /// Free devices of each class, and the index of the stage placed last, on which later moves depend.
    type FreeDevices = (Free, u32);

    fn links(&self) -> &Links {
        &self.links
    }

    fn rest(&self, situation: u32) -> (Free, u32) {
        self.situations[situation as usize]
    }

    fn rivals(&self, situation: u32) -> u32 {
        self.situations[situation as usize].1
    }

    fn leaves_as_much(&self, one: u32, other: u32) -> bool {
        let [one, other] = [one, other].map(|situation| self.situations[situation as usize].0);
        one.iter().zip(other).all(|(one, other)| *one >= other)
    }

    fn free(&self, (free, _): (Free, u32)) -> u32 {
        free[0] // The first class has all devices.
    }

    fn free_speed(&self, (free, _): (Free, u32)) -> f64 {
        // The first class of each speed has all devices of at least that speed. So a device of speed v is in the first
        // class of each speed up to v, and the differences between these speeds add up to v.
        let (mut all, mut slower) = (0.0, 0.0);
        for (class, free) in self.classes.iter().zip(free) {
            all += (class.speed - slower) * f64::from(free);
            slower = class.speed;
        }
        all
    }

    fn free_units(&self, (free, _): (Free, u32)) -> u32 {
        let (mut all, mut slower) = (0, 0);
        for (class, free) in self.classes.iter().zip(free) {
            let each = self.units.of(class.speed);
            all += (each - slower) * free;
            slower = each;
        }
        all
    }

    fn moves(&mut self, situation: u32) -> Arc<[PlacementMove]> {
        let last = self.situations[situation as usize].1;
        // Moves depend only on the stage placed last, so all situations with that stage share them.
        if let Some(moves) = self.moves.get(&last) {
            return moves.clone();
        }
        let moves = self.moves_before(self.lasts[last as usize]);
        self.moves.insert(last, moves.clone());
        moves
    }

    fn after(&self, situation: u32, choice: &PlacementMove) -> Option<(Free, u32)> {
        let mut free = self.situations[situation as usize].0;
        let class = &self.classes[usize::from(choice.device_class)];
        if free[usize::from(choice.device_class)] < choice.fewest {
            return None;
        }
        for (at, is_contained) in class.contained_in.iter().enumerate() {
            if *is_contained {
                free[at] -= choice.fewest;
            }
        }
        // A class has no more free devices than a class that contains it. Classes are sorted so that containing ones
        // come first, so one pass over all pairs suffices.
        for at in 1..self.classes.len() {
            for other in 0..at {
                if self.classes[at].contained_in[other] {
                    free[at] = free[at].min(free[other]);
                }
            }
        }
        Some((free, choice.next))
    }

    fn situation(&mut self, rest: (Free, u32)) -> u32 {
        let next = self.situations.len() as u32;
        let situations = &mut self.situations;
        *self.index.entry(rest).or_insert_with(|| {
            situations.push(rest);
            next
        })
    }
}
