//! Enumeration of the down-sets of a graph: all of them, or the best nested ones.

use rustc_hash::{FxHashMap, FxHashSet};

use super::units::LayerUnit;
use super::{BitSet, LayerReaders};
use crate::control::Control;
use crate::error::Result;
use crate::model::graph::Graph;

/// Maximum number of orders that [`best_order`] keeps side by side. Not tuned.
const BEAM: usize = 128;
/// Limit on the 64-bit words that [`best_order`] copies. It narrows the beam of large models so that the search takes a
/// few seconds at most.
const MAX_COPIED_WORDS: usize = 2_000_000_000;

/// A down-set and the units that may enter next.
#[derive(Clone)]
struct DownSet {
    set: BitSet,
    ready: Vec<usize>,
}

impl DownSet {
    fn start(units: &[LayerUnit], layers: usize) -> Self {
        let set = BitSet::empty(layers);
        let ready = (0..units.len()).filter(|&unit| units[unit].needs.is_empty()).collect();
        Self { set, ready }
    }

    /// Returns the units that may enter once `unit` is inside `set`, too.
    fn ready_after(&self, unit: usize, set: &BitSet, units: &[LayerUnit]) -> Vec<usize> {
        let waiting = self.ready.iter().copied().filter(|&other| other != unit);
        let woken = units[unit].next.iter().copied().filter(|&other| units[other].may_enter(set));
        waiting.chain(woken).collect()
    }
}

impl LayerUnit {
    /// Returns whether every layer that the unit needs is in `set`.
    fn may_enter(&self, set: &BitSet) -> bool {
        self.needs.iter().all(|&layer| set.contains(layer))
    }

    /// Returns `set` with this unit added.
    fn added_to(&self, set: &BitSet) -> BitSet {
        let mut with = set.clone();
        self.adds.iter().for_each(|&layer| with.insert(layer));
        with
    }
}

/// Returns the units one after another if no two of them are ever ready at once, else `None`.
pub(super) fn row(units: &[LayerUnit], layers: usize) -> Option<Vec<&LayerUnit>> {
    let mut front = DownSet::start(units, layers);
    let mut row = Vec::with_capacity(units.len());
    while let [unit] = front.ready[..] {
        units[unit].adds.iter().for_each(|&layer| front.set.insert(layer));
        front.ready = front.ready_after(unit, &front.set, units);
        row.push(&units[unit]);
    }
    (row.len() == units.len()).then_some(row)
}

/// Lists every down-set that is a union of units, each after its subsets. `None` if there are more than `bound`.
///
/// # Errors
/// Returns the error of `control` if it was stopped.
pub(super) fn all(units: &[LayerUnit], layers: usize, bound: usize, control: &Control) -> Result<Option<Vec<BitSet>>> {
    // The prefixes of any order are down-sets already, and there is one more of them than units.
    if units.len() >= bound {
        return Ok(None);
    }
    let start = DownSet::start(units, layers);
    let mut seen = FxHashSet::from_iter([start.set.clone()]);
    let mut fronts = vec![start];
    while let Some(front) = fronts.pop() {
        control.check()?;
        for &unit in &front.ready {
            let set = units[unit].added_to(&front.set);
            if seen.insert(set.clone()) {
                if seen.len() > bound {
                    return Ok(None);
                }
                let ready = front.ready_after(unit, &set, units);
                fronts.push(DownSet { set, ready });
            }
        }
    }
    // A hash set has no stable order. Sorting by size puts subsets first, and by content makes the numbering
    // reproducible.
    let mut sets: Vec<BitSet> = seen.into_iter().collect();
    sets.sort_unstable_by(|one, two| one.count().cmp(&two.count()).then_with(|| one.cmp(two)));
    Ok(Some(sets))
}

/// Returns one order of the units, chosen by beam search for the smallest sum of bytes over its cuts.
///
/// # Errors
/// Returns the error of `control` if it was stopped.
pub(super) fn best_order<'a>(
    graph: &Graph,
    order: &[usize],
    readers: &LayerReaders,
    units: &'a [LayerUnit],
    control: &Control,
) -> Result<Vec<&'a LayerUnit>> {
    struct WalkPath {
        front: DownSet,
        boundary_bytes: f64,
        sum_of_boundaries: f64,
    }
    let bytes = |position: usize| graph.layers[order[position]].measured[0].activation_bytes;
    // The boundary grows by outputs that are still read outside, and shrinks by outputs whose last reader has entered.
    let boundary_after = |trail: &WalkPath, unit: &LayerUnit, set: &BitSet| {
        let mut boundary = trail.boundary_bytes;
        let mut freed = Vec::new();
        for &position in unit.adds.iter().filter(|&&position| !trail.front.set.contains(position)) {
            if readers.crosses(position, set) {
                boundary += bytes(position);
            }
            freed.extend(readers.before[position].iter().copied().filter(|&from| trail.front.set.contains(from)));
        }
        freed.sort_unstable();
        freed.dedup();
        boundary - freed.into_iter().filter(|&from| !readers.crosses(from, set)).map(bytes).sum::<f64>()
    };
    let beam = (MAX_COPIED_WORDS / (units.len() * order.len().div_ceil(64)).max(1)).clamp(1, BEAM);
    let start = DownSet::start(units, order.len());
    let mut level = vec![WalkPath { front: start, boundary_bytes: 0.0, sum_of_boundaries: 0.0 }];
    // For each unit that has entered and each path: the path before it, and which unit that was. Storing these two
    // numbers instead of whole orders keeps the memory linear in beam and units.
    let mut entered: Vec<Vec<(u32, u32)>> = Vec::with_capacity(units.len());
    for _ in units {
        // Maps a set to (sum of boundaries, boundary, parent, unit). Two paths to one set have the same future, so only
        // the cheaper one is kept.
        let mut best: FxHashMap<BitSet, (f64, f64, usize, usize)> = FxHashMap::default();
        for (parent, trail) in level.iter().enumerate() {
            control.check()?;
            for &unit in &trail.front.ready {
                let set = units[unit].added_to(&trail.front.set);
                let boundary = boundary_after(trail, &units[unit], &set);
                let sum = trail.sum_of_boundaries + boundary;
                let entry = best.entry(set).or_insert((f64::INFINITY, boundary, parent, unit));
                if sum < entry.0 {
                    *entry = (sum, boundary, parent, unit);
                }
            }
        }
        let mut found: Vec<_> = best.into_iter().collect();
        // Ties are broken by the set, since the order of a hash map is arbitrary.
        found.sort_unstable_by(|(one, a), (two, b)| a.0.total_cmp(&b.0).then_with(|| one.cmp(two)));
        found.truncate(beam);
        entered.push(found.iter().map(|(_, (.., parent, unit))| (*parent as u32, *unit as u32)).collect());
        level = found
            .into_iter()
            .map(|(set, (sum_of_boundaries, boundary_bytes, parent, unit))| {
                let ready = level[parent].front.ready_after(unit, &set, units);
                WalkPath { front: DownSet { set, ready }, boundary_bytes, sum_of_boundaries }
            })
            .collect();
    }
    let mut at = 0; // the last level has one path only: the full set
    let mut chosen: Vec<&LayerUnit> = Vec::with_capacity(units.len());
    for level in entered.iter().rev() {
        let (parent, unit) = level[at];
        chosen.push(&units[unit as usize]);
        at = parent as usize;
    }
    chosen.reverse();
    Ok(chosen)
}

/// Returns the indices of nested states from the first to the last, one unit apart, with the smallest sum of `cost`.
pub(super) fn shortest_chain(sets: &[BitSet], units: &[LayerUnit], cost: impl Fn(usize) -> f64) -> Vec<usize> {
    let index: FxHashMap<&BitSet, usize> = sets.iter().enumerate().map(|(state, set)| (set, state)).collect();
    let mut best = vec![(f64::INFINITY, 0); sets.len()];
    best[0].0 = 0.0;
    // States come after their subsets, so each one's best predecessor is final when it is reached.
    for (state, set) in sets.iter().enumerate() {
        for unit in units.iter().filter(|unit| unit.may_enter(set)) {
            let with = unit.added_to(set);
            // A unit of layers that have entered with an earlier reader adds nothing.
            if with == *set {
                continue;
            }
            let after = index[&with];
            let sum = best[state].0 + cost(after);
            if sum < best[after].0 {
                best[after] = (sum, state);
            }
        }
    }
    let mut chain: Vec<usize> =
        std::iter::successors(Some(sets.len() - 1), |&state| (state > 0).then(|| best[state].1)).collect();
    chain.reverse();
    chain
}
