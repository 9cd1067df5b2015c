//! A line of nested cuts of a model, for plans whose stages are bounded by consecutive cuts of it.

use crate::cost::LayerSums;
use crate::planner::effort::placement;

/// Returns a line of nested cuts with the smallest sum of the bytes that cross them. Each cut is as close to the next
/// one as possible.
pub(crate) fn line(model: &LayerSums, cut_bytes: &[f64]) -> Vec<u32> {
    let cuts = model.cuts();
    // All cuts of a chain are nested already.
    if model.is_chain {
        return (0..cuts as u32).collect();
    }
    // Dynamic program over cuts: for each, the smallest sum of a line that ends there, and the cut before it.
    let mut best = vec![(0.0, 0_u32); cuts];
    let mut neighbours: Vec<u32> = Vec::new();
    for end in 1..cuts {
        neighbours.clear();
        for begin in model.begins(end).take(placement::ROW_CANDIDATES) {
            // Larger cuts come first. A cut inside a nearer one is not directly next to `end`, so it is skipped.
            if !neighbours.iter().any(|&nearer| is_nested(model, begin, nearer)) {
                neighbours.push(begin);
            }
            // A graph may have very many neighbors of one cut. The first ones suffice for a good line.
            if neighbours.len() == placement::ROW_NEIGHBOURS {
                break;
            }
        }
        let sum = |&begin: &u32| (best[begin as usize].0 + cut_bytes[end], begin);
        best[end] = (neighbours.iter().map(sum).min_by(|a, b| a.0.total_cmp(&b.0))).unwrap_or((f64::INFINITY, 0));
    }
    let before = |&cut: &u32| (cut > 0).then(|| best[cut as usize].1);
    let mut line: Vec<u32> = std::iter::successors(Some(cuts as u32 - 1), before).collect();
    line.reverse();
    line
}

/// Returns whether a stage may begin at one cut and end at the other.
pub(crate) fn is_nested(model: &LayerSums, begin: u32, end: u32) -> bool {
    model.is_inside(begin as usize, end as usize)
}
