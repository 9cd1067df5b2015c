//! The order in which layers run backward. It depends on the graph, not on the order of lines in its file.
//!
//! Independent branches may run backward in any order, and the gradients of each layer are reduced over the replicas as
//! soon as they exist. So the all-reduce time that remains when the pass ends depends on that order. Layers with many
//! gradient bytes per second of backward pass (a high *rate*) run first. Among the layers that are ready (all their
//! readers have run), the next one has the highest rate, counted together with the layers in front of it that only
//! become ready through it and raise the rate. That is Smith's rule (1956), which minimizes the sum of bytes × time for
//! independent jobs, in Horn's form (1972) for trees. In a graph, a layer with several readers counts for each of them
//! in equal parts.
//!
//! Layers of equal rate are ordered by the place of their last reader, so that a branch runs to its end; then by the
//! costs and structure of the layers that feed them; then by id. The position in the file decides only between layers
//! without ids.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use super::graph::Graph;
use crate::error::Result;

/// Weight gradients and the backward time that produces them.
#[derive(Debug, Clone, Copy)]
struct Work {
    bytes: f64,
    backward_s: f64,
}

impl Work {
    /// Returns bytes per second of backward pass: infinite for gradients that take no time, and 0 without gradients.
    fn rate(self) -> f64 {
        if self.bytes > 0.0 { self.bytes / self.backward_s } else { 0.0 }
    }
}

/// Priority of a layer that is ready. Fields are compared in this order, and the largest runs first.
#[derive(PartialEq, PartialOrd)]
struct Claim<'a> {
    rate: f64,
    /// Positions of its readers in the backward pass, the last one first.
    readers: Vec<usize>,
    above: u64,
    id: &'a str,
    layer: usize,
}

impl Eq for Claim<'_> {}

// A total order is sound although rates are floats: `rate` is never NaN, since it divides only if bytes are positive.
impl Ord for Claim<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.partial_cmp(other).expect("rates are numbers")
    }
}

/// Returns indices of `graph.layers` such that every edge goes forward. The backward pass runs them from last to first.
///
/// # Errors
/// Returns the errors of [`Graph::topological_order`].
pub(crate) fn of(graph: &Graph) -> Result<Vec<usize>> {
    let count = graph.layers.len();
    let forward = graph.topological_order()?;
    let (mut before, mut after) = (vec![Vec::new(); count], vec![Vec::new(); count]);
    for &(from, to) in &graph.edges {
        before[to].push(from);
        after[from].push(to);
    }
    for ends in before.iter_mut().chain(&mut after) {
        ends.sort_unstable();
        ends.dedup();
    }
    let mut work = vec![Work { bytes: 0.0, backward_s: 0.0 }; count];
    let mut above = vec![0_u64; count];
    for &layer in &forward {
        // Horn's rule is exact for trees. A layer with several readers counts for each in equal parts, so that its work
        // is not counted several times.
        let shared = |&feeder: &usize| {
            let (Work { bytes, backward_s }, readers) = (work[feeder], after[feeder].len() as f64);
            Work { bytes: bytes / readers, backward_s: backward_s / readers }
        };
        // The feeders with the highest rate are joined first: only a prefix of this order can raise the rate of the
        // group.
        let mut brought: Vec<Work> = before[layer].iter().map(shared).collect();
        brought.sort_by(|a, b| b.rate().total_cmp(&a.rate()).then(b.bytes.total_cmp(&a.bytes)));
        let backward_s = graph.layers[layer].measured.iter().map(|at| at.backward_s).sum();
        let own = Work { bytes: graph.layers[layer].trained_bytes(), backward_s };
        work[layer] = brought.into_iter().fold(own, |all, more| {
            let raises = more.rate() > all.rate();
            let with = Work { bytes: all.bytes + more.bytes, backward_s: all.backward_s + more.backward_s };
            if raises { with } else { all }
        });
        above[layer] = hash(graph, layer, before[layer].iter().map(|&feeder| above[feeder]));
    }
    // The place of a reader is known when a layer becomes ready, since all its readers have run by then.
    let claim = |layer: usize, place: &[usize]| {
        let mut readers: Vec<usize> = after[layer].iter().map(|&reader| place[reader]).collect();
        readers.sort_unstable_by_key(|&reader| Reverse(reader));
        Claim { rate: work[layer].rate(), readers, above: above[layer], id: &graph.layers[layer].id, layer }
    };
    let mut place = vec![usize::MAX; count];
    let mut waiting: Vec<usize> = after.iter().map(Vec::len).collect();
    let mut ready: BinaryHeap<Claim<'_>> =
        (0..count).filter(|&layer| waiting[layer] == 0).map(|layer| claim(layer, &place)).collect();
    let mut backward = Vec::with_capacity(count);
    while let Some(Claim { layer, .. }) = ready.pop() {
        place[layer] = backward.len();
        backward.push(layer);
        for &feeder in &before[layer] {
            waiting[feeder] -= 1;
            if waiting[feeder] == 0 {
                ready.push(claim(feeder, &place));
            }
        }
    }
    backward.reverse();
    Ok(backward)
}

/// Returns a hash of a layer's costs and of the costs of all layers that feed it, also indirectly.
///
/// It makes the order independent of the file: two layers of equal rank differ by structure before they differ by
/// index.
fn hash(graph: &Graph, layer: usize, feeders: impl Iterator<Item = u64>) -> u64 {
    let mut hasher = FxHasher::default();
    let layer = &graph.layers[layer];
    layer.parameter_bytes.to_bits().hash(&mut hasher);
    for at in &layer.measured {
        for number in [at.forward_s, at.backward_s, at.activation_bytes, at.saved_bytes] {
            number.to_bits().hash(&mut hasher);
        }
    }
    // Sorted, so that the order in which the file lists edges does not change the hash.
    let mut feeders: Vec<u64> = feeders.collect();
    feeders.sort_unstable();
    feeders.hash(&mut hasher);
    hasher.finish()
}
