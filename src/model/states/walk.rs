//! Walks over the down-sets of a graph: all of them, or the best nested ones.

use rustc_hash::{FxHashMap, FxHashSet};

use super::units::Unit;
use super::{Set, Wires};
use crate::model::graph::Graph;

/// Orders kept side by side by [`best_order`].
const BEAM: usize = 128;

/// A down-set and the units that may enter next.
#[derive(Clone)]
struct Front {
    set: Set,
    ready: Vec<usize>,
}

impl Front {
    fn start(units: &[Unit], layers: usize) -> Self {
        let set = Set::empty(layers);
        let ready = (0..units.len()).filter(|&unit| units[unit].needs == set).collect();
        Self { set, ready }
    }

    /// What is ready once `unit` is in, too.
    fn ready_after(&self, unit: usize, set: &Set, units: &[Unit]) -> Vec<usize> {
        let waiting = self.ready.iter().copied().filter(|&other| other != unit);
        let woken = units[unit].next.iter().copied().filter(|&other| units[other].needs.is_subset(set));
        waiting.chain(woken).collect()
    }
}

/// Every down-set that is a union of units, each after its subsets; None if they are more than `bound`.
pub(super) fn all(units: &[Unit], layers: usize, bound: usize) -> Option<Vec<Set>> {
    let start = Front::start(units, layers);
    let mut seen = FxHashSet::from_iter([start.set.clone()]);
    let mut fronts = vec![start];
    while let Some(front) = fronts.pop() {
        for &unit in &front.ready {
            let set = front.set.union(&units[unit].adds);
            if seen.insert(set.clone()) {
                if seen.len() > bound {
                    return None;
                }
                let ready = front.ready_after(unit, &set, units);
                fronts.push(Front { set, ready });
            }
        }
    }
    let mut sets: Vec<Set> = seen.into_iter().collect();
    sets.sort_unstable_by(|one, two| one.count().cmp(&two.count()).then_with(|| one.cmp(two)));
    Some(sets)
}

/// The prefixes of one order of the units, chosen by beam search for the smallest sum of bytes over its cuts.
pub(super) fn best_order(graph: &Graph, order: &[usize], wires: &Wires, units: &[Unit]) -> Vec<Set> {
    struct Trail {
        front: Front,
        boundary_bytes: f64,
        sum_of_boundaries: f64,
        /// Index into the fronts one unit earlier.
        parent: usize,
    }
    let bytes = |position: usize| graph.layers[order[position]].measured[0].activation_bytes;
    // The boundary grows by outputs that are still read outside, and shrinks by those whose last reader came in.
    let boundary_after = |trail: &Trail, set: &Set| {
        let mut boundary = trail.boundary_bytes;
        let mut freed = Vec::new();
        for position in set.iter().filter(|&position| !trail.front.set.contains(position)) {
            if wires.crosses(position, set) {
                boundary += bytes(position);
            }
            freed.extend(wires.before[position].iter().copied().filter(|&from| trail.front.set.contains(from)));
        }
        freed.sort_unstable();
        freed.dedup();
        boundary - freed.into_iter().filter(|&from| !wires.crosses(from, set)).map(bytes).sum::<f64>()
    };
    let start = Front::start(units, order.len());
    let mut levels = vec![vec![Trail { front: start, boundary_bytes: 0.0, sum_of_boundaries: 0.0, parent: 0 }]];
    for _ in units {
        let level = &levels[levels.len() - 1];
        // set -> (sum of boundaries, boundary, parent, unit)
        let mut best: FxHashMap<Set, (f64, f64, usize, usize)> = FxHashMap::default();
        for (parent, trail) in level.iter().enumerate() {
            for &unit in &trail.front.ready {
                let set = trail.front.set.union(&units[unit].adds);
                let boundary = boundary_after(trail, &set);
                let sum = trail.sum_of_boundaries + boundary;
                let entry = best.entry(set).or_insert((f64::INFINITY, boundary, parent, unit));
                if sum < entry.0 {
                    *entry = (sum, boundary, parent, unit);
                }
            }
        }
        let mut found: Vec<_> = best.into_iter().collect();
        found.sort_unstable_by(|(one, a), (two, b)| a.0.total_cmp(&b.0).then_with(|| one.cmp(two)));
        found.truncate(BEAM);
        let next = found
            .into_iter()
            .map(|(set, (sum_of_boundaries, boundary_bytes, parent, unit))| {
                let ready = level[parent].front.ready_after(unit, &set, units);
                Trail { front: Front { set, ready }, boundary_bytes, sum_of_boundaries, parent }
            })
            .collect();
        levels.push(next);
    }
    let mut at = 0; // the last level holds the full set alone
    let mut sets: Vec<Set> = levels
        .iter()
        .rev()
        .map(|level| {
            let trail = &level[at];
            at = trail.parent;
            trail.front.set.clone()
        })
        .collect();
    sets.reverse();
    sets
}

/// Nested states from the first to the last, one unit apart, with the smallest sum of `price`. Returns their indices.
pub(super) fn shortest_chain(sets: &[Set], units: &[Unit], price: impl Fn(usize) -> f64) -> Vec<usize> {
    let index: FxHashMap<&Set, usize> = sets.iter().enumerate().map(|(state, set)| (set, state)).collect();
    let mut best = vec![(f64::INFINITY, 0); sets.len()];
    best[0].0 = 0.0;
    for (state, set) in sets.iter().enumerate() {
        for unit in units.iter().filter(|unit| unit.needs.is_subset(set) && !unit.adds.is_subset(set)) {
            let after = index[&set.union(&unit.adds)];
            let sum = best[state].0 + price(after);
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
