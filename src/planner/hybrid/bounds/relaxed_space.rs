//! Lemma *The relaxed space has a twin of every plan* (docs/proofs.md#links-wherever-stages-lie): with the same cuts, devices
//! and windows, and no longer paths. So the bound of a pass over this space is a bound on every plan.
//!
//! A situation knows how many devices are free, how many the stage placed last has, and whether this stage is in one node,
//! with how many devices free beside it. A move puts the next stage beside it, into another node, or spreads it. The cost of
//! a move is the smallest over all placements of both stages ([`Links`]). The space gives bounds, and no plans.
//!
//! A stage may take the devices of all classes that are as fast and as large as its own. For each class the devices that are
//! left are counted, with those of classes that share devices. So the counts are never below those of a real placement.

use crate::planner::effort::{passes, tables};
use crate::planner::hybrid::{
    bounds::{
        device_classes::{DeviceClass, Units, kinds},
        link_bounds::{Links, Span, Spread},
    },
    placement::placement_space::{PlacementMove, Placements, Prices},
    subproblem::Subproblem,
};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::cost::network::Rate;

/// The stage placed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Last {
    /// None yet.
    Nothing,
    /// On one node of this class, with this number of free devices beside it.
    One {
        span: Span,
        kind: u16,
        room: u32,
    },
    Spread(Spread),
}

/// Free devices of each class.
type Free = [u32; tables::MAX_DEVICE_CLASSES];

/// Situations that the search has reached, and moves between them.
pub(crate) struct Relaxed {
    links: Links,
    /// Ranges of replica counts.
    spans: Vec<Span>,
    /// Whether ranges of the same share are split.
    is_fine: bool,
    kinds: Vec<DeviceClass>,
    units: Units,
    /// Devices that can be of use.
    most: u32,
    /// Free devices of each class, and the stage placed last.
    situations: Vec<(Free, u32)>,
    index: FxHashMap<(Free, u32), u32>,
    lasts: Vec<Last>,
    last_index: FxHashMap<Last, u32>,
    moves: FxHashMap<u32, Arc<[PlacementMove]>>,
    /// All-reduce rates of spread stages.
    sums: FxHashMap<Spread, Rate>,
    prices: Prices,
}

impl Relaxed {
    /// Returns the space with situation 0, in which all devices are free.
    pub(crate) fn new(task: &Subproblem<'_>) -> Self {
        let kinds = kinds(task.cluster);
        let links = Links::new(task, false);
        let mut space = Self {
            spans: links.spans.clone(),
            links,
            is_fine: false,
            situations: Vec::new(),
            index: FxHashMap::default(),
            lasts: vec![Last::Nothing],
            last_index: FxHashMap::default(),
            moves: FxHashMap::default(),
            sums: FxHashMap::default(),
            prices: Prices::default(),
            most: task.max_devices(),
            units: Units::new(task.cluster),
            kinds,
        };
        let mut free = [0; tables::MAX_DEVICE_CLASSES];
        free.iter_mut().zip(&space.kinds).for_each(|(free, kind)| *free = kind.devices);
        space.situation((free, 0));
        space
    }

    /// Splits ranges of replicas that give the same share.
    pub(crate) fn refine(&mut self) {
        self.is_fine = true;
        self.spans = self.links.spans.iter().flat_map(|&span| parts(span)).collect();
        self.moves.clear();
    }

    /// Returns whether refining would split this range of replicas.
    pub(crate) fn is_joined(&self, span: Span) -> bool {
        !self.is_fine && parts(span).nth(1).is_some()
    }

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
            if span.0 > self.most {
                break;
            }
            for at in 0..self.kinds.len() {
                let kind = self.kinds[at].clone();
                let mut add = |space: &mut Self, transfer: Rate, sync: Rate, last: Last| {
                    moves.push(PlacementMove {
                        next: space.last(last),
                        replicas: span.1,
                        fewest: span.0,
                        kind: at as u16,
                        transfer,
                        sync,
                        speed: kind.speed,
                        memory_bytes: kind.memory_bytes,
                        price: space.prices.of(span.1, sync, kind.speed, kind.memory_bytes),
                        room: if let Last::One { room, .. } = last { Some(room) } else { None },
                        takes: Vec::new(),
                    });
                };
                if let Some(widest) = kind.widest.filter(|&widest| span.0 <= widest) {
                    let sync = self.links.sum_in_one(span);
                    let one = |room| Last::One { span, kind: at as u16, room };
                    let alone = one(widest - span.0);
                    match behind {
                        Last::Nothing => add(self, Rate::default(), sync, alone),
                        Last::One { span: other, kind: theirs, room } => {
                            if theirs == at as u16 && span.0 <= room {
                                add(self, self.links.beside(span, other), sync, one(room - span.0));
                            }
                            if self.links.machines > 1 {
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
                    let sync = *self.sums.entry(own).or_insert_with(|| self.links.sum_spread(own));
                    add(self, transfer, sync, Last::Spread(own));
                }
            }
        }
        moves.into()
    }
}

/// Splits a range of replicas. A stage takes the fewest devices of its part, and has as many ports as the most.
fn parts((fewest, most): Span) -> impl Iterator<Item = Span> {
    let part = move |fewest: u32| (fewest, (fewest + fewest / passes::FINE_RANGE).min(most));
    std::iter::successors(Some(part(fewest)), move |last| (last.1 < most).then(|| part(last.1 + 1)))
}

impl Placements for Relaxed {
    const IS_REAL: bool = false;

    type FreeDevices = (Free, u32);

    fn links(&self) -> &Links {
        &self.links
    }

    fn rest(&self, situation: u32) -> (Free, u32) {
        self.situations[situation as usize]
    }

    fn free(&self, (free, _): (Free, u32)) -> u32 {
        free[0]
    }

    fn free_speed(&self, (free, _): (Free, u32)) -> f64 {
        // The first kind of each speed has all devices that are as fast; each adds what it is faster than the one before.
        let (mut all, mut slower) = (0.0, 0.0);
        for (kind, free) in self.kinds.iter().zip(free) {
            all += (kind.speed - slower) * f64::from(free);
            slower = kind.speed;
        }
        all
    }

    fn free_units(&self, (free, _): (Free, u32)) -> u32 {
        let (mut all, mut slower) = (0, 0);
        for (kind, free) in self.kinds.iter().zip(free) {
            let each = self.units.of(kind.speed);
            all += (each - slower) * free;
            slower = each;
        }
        all
    }

    fn moves(&mut self, situation: u32) -> Arc<[PlacementMove]> {
        let last = self.situations[situation as usize].1;
        if let Some(moves) = self.moves.get(&last) {
            return moves.clone();
        }
        let moves = self.moves_before(self.lasts[last as usize]);
        self.moves.insert(last, moves.clone());
        moves
    }

    fn after(&self, situation: u32, choice: &PlacementMove) -> Option<(Free, u32)> {
        let mut free = self.situations[situation as usize].0;
        let kind = &self.kinds[usize::from(choice.kind)];
        if free[usize::from(choice.kind)] < choice.fewest {
            return None;
        }
        for (at, is_part) in kind.parts_of.iter().enumerate() {
            if *is_part {
                free[at] -= choice.fewest;
            }
        }
        // Kinds come after those that have all of their devices.
        for at in 1..self.kinds.len() {
            for other in 0..at {
                if self.kinds[at].parts_of[other] {
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
