//! Lemma *Cuts in groups* (docs/proofs.md#cuts-in-groups): an entry of a group, for some number of stages behind it, is
//! at most the increments of the stages in front of any of its cuts with that number of stages behind the cut.
//!
//! A group is a slice of the sum of two shares: of the work below a cut, and of the weights below it. No cut contains a
//! cut of a later group.

use crate::cost::LayerSums;
use crate::planner::effort::tables;

/// Groups of cuts, in an order in which no cut contains a cut of a later group.
#[derive(Default)]
pub(crate) struct CutGroups {
    /// Number of groups that was asked for.
    pub max_groups: usize,
    /// Cuts of each group, ascending. The first group has the empty cut alone, and the last one the full cut.
    pub cuts: Vec<Vec<usize>>,
    /// Group of each cut.
    pub of_cut: Vec<u32>,
}

impl CutGroups {
    /// Returns about `max_groups` groups whose cuts differ little in the work and the weights below them. `work_s` has
    /// the work of each layer. A model with no more cuts than `max_groups` gets one group for each.
    pub(crate) fn new(model: &LayerSums, work_s: &[f64], max_groups: usize) -> Self {
        let shares_below = |each: &[f64]| {
            let below = model.sums_below(each);
            let whole = below[below.len() - 1];
            below.into_iter().map(move |below| if whole > 0.0 { below / whole } else { 0.0 })
        };
        let both: Vec<f64> = shares_below(work_s)
            .zip(shares_below(&model.layer_parameter_bytes))
            .map(|(work, bytes)| work + bytes)
            .collect();
        let last = model.cuts() - 1;
        let inner = |slices: f64| {
            let mut slice: Vec<(f64, usize)> = (1..last).map(|cut| ((both[cut] * slices).floor(), cut)).collect();
            slice.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let mut groups: Vec<(f64, Vec<usize>)> = Vec::new();
            for (slice, cut) in slice {
                match groups.last_mut() {
                    Some((known, cuts)) if known.total_cmp(&slice).is_eq() => cuts.push(cut),
                    _ => groups.push((slice, vec![cut])),
                }
            }
            groups
        };
        let mut cuts = vec![vec![0]];
        if model.cuts() <= max_groups {
            cuts.extend((1..last).map(|cut| vec![cut]));
        } else {
            // Slices within one large layer stay empty, so the first try gives too few groups. The sum of both shares
            // goes up to 2, so `max_groups / 2` slices per unit make `max_groups` slices at first.
            let mut slices = max_groups as f64 / 2.0;
            let mut groups = inner(slices);
            let (factor, max_times) = tables::SLICE_GROWTH;
            for _ in 0..max_times {
                slices *= factor;
                let more = inner(slices);
                if more.len() > max_groups {
                    break;
                }
                groups = more;
            }
            cuts.extend(groups.into_iter().map(|(_, cuts)| cuts));
        }
        cuts.push(vec![last]);
        let mut of_cut = vec![0; model.cuts()];
        for (group, cuts) in (0..).zip(&cuts) {
            for &cut in cuts {
                of_cut[cut] = group;
            }
        }
        Self { max_groups, cuts, of_cut }
    }
}
