//! The pipeline with one stage per device whose slowest stage or transfer is shortest, as the original finds it.
//!
//! Devices are taken one at a time: the first one of an unused node, or the next one of the first node that is
//! used but not full. So `used` devices on `begun` nodes are always the same devices. The search keeps one best
//! pipeline for each such pair and last state, as the original does.

use super::{Devices, Model};
use crate::control::Control;
use crate::error::{Error, Result};

/// Limit on the extensions of a pipeline by one stage. The original would take days for this number.
const MAX_EXTENSIONS: usize = 1_000_000_000;

/// A pipeline with one device per stage.
pub(super) struct Chain {
    /// Time of the slowest stage or transfer, for the whole batch.
    pub(super) bottleneck_s: f64,
    /// Last state and device of each stage, first stage first.
    pub(super) stages: Vec<(usize, u32)>,
}

/// Best pipeline that ends with a given state on a given set of devices.
#[derive(Clone, Copy)]
struct DpState {
    bottleneck_s: f64,
    /// Device of its last stage.
    device: u32,
    /// Last state and index of the occupancy of the pipeline without its last stage.
    before: (usize, usize),
}

const NONE: DpState = DpState { bottleneck_s: f64::INFINITY, device: 0, before: (0, 0) };

/// Use of one more device: the indices of the occupancy before and after it, and the device.
struct Move {
    before: usize,
    behind: usize,
    device: u32,
}

/// Returns the best pipeline over all devices. `None` if fewer states are nested than there are devices, or if the
/// search would take too long.
pub(super) fn best(model: &Model, devices: &Devices, control: &Control) -> Result<Option<Chain>> {
    let states = model.states.len();
    let count = devices.count() as usize;
    if count > model.depth() {
        return Ok(None);
    }
    let begun: Vec<Vec<usize>> = (1..=count).map(|used| occupancies(devices, used)).collect();
    // Occupancies and moves do not depend on the model, so they are computed once instead of for every state.
    let moves: Vec<Vec<Move>> = (1..count).map(|used| moves(devices, used, &begun)).collect();
    let pairs: usize = model.inside.iter().map(Vec::len).sum();
    if moves.iter().map(Vec::len).sum::<usize>().saturating_mul(pairs) > MAX_EXTENSIONS {
        return Ok(None);
    }
    // The index of a cell is `cells[used - 1][state * occupancies + occupancy]`.
    let first = model.states.iter().map(|sums| DpState { bottleneck_s: sums.compute_s, ..NONE }).collect();
    let mut cells: Vec<Vec<DpState>> = vec![first];
    for (moves, begun) in moves.iter().zip(begun.windows(2)) {
        if control.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let (widths, before) = ((begun[0].len(), begun[1].len()), &cells[cells.len() - 1]);
        let mut now = vec![NONE; states * widths.1];
        for state in 1..states {
            let compute_s = model.states[state].compute_s;
            for cut in model.inside[state].iter().map(|&cut| cut as usize) {
                let stage_s = compute_s - model.states[cut].compute_s;
                // Activations go forward and gradients of the same size go back, hence the factor 2.
                let bytes = 2.0 * model.states[cut].output_activation_bytes;
                for step in moves {
                    let from = &before[cut * widths.0 + step.before];
                    if from.bottleneck_s == f64::INFINITY {
                        continue;
                    }
                    let transfer_s = devices.split_concat_s(&[from.device], &[step.device], bytes);
                    let bottleneck_s = from.bottleneck_s.max(stage_s).max(transfer_s);
                    let cell = &mut now[state * widths.1 + step.behind];
                    if bottleneck_s < cell.bottleneck_s {
                        *cell = DpState { bottleneck_s, device: step.device, before: (cut, step.before) };
                    }
                }
            }
        }
        cells.push(now);
    }
    Ok(traced(&cells, &begun, states - 1))
}

/// Rebuilds the pipeline that ends with state `last` on all devices.
fn traced(cells: &[Vec<DpState>], begun: &[Vec<usize>], last: usize) -> Option<Chain> {
    let bottleneck_s = cells.last()?[last].bottleneck_s; // there is only one occupancy with all devices in use
    let (mut state, mut occupancy) = (last, 0);
    let mut stages = Vec::with_capacity(cells.len());
    for (level, begun) in cells.iter().zip(begun).rev() {
        let cell = &level[state * begun.len() + occupancy];
        stages.push((state, cell.device));
        (state, occupancy) = cell.before;
    }
    stages.reverse();
    bottleneck_s.is_finite().then_some(Chain { bottleneck_s, stages })
}

/// Returns the numbers of nodes that `used` devices may be spread over, largest first.
fn occupancies(devices: &Devices, used: usize) -> Vec<usize> {
    let holds = |begun: usize| (0..begun).map(|node| devices.node(node).len()).sum::<usize>();
    (1..=devices.nodes().min(used)).rev().filter(|&begun| holds(begun) >= used).collect()
}

/// Returns all choices of one more device after `used`, unused nodes first.
fn moves(devices: &Devices, used: usize, begun: &[Vec<usize>]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (before, &nodes) in begun[used - 1].iter().enumerate() {
        let behind = |nodes: usize| begun[used].iter().position(|&begun| begun == nodes);
        if nodes < devices.nodes()
            && let Some(behind) = behind(nodes + 1)
        {
            moves.push(Move { before, behind, device: devices.node(nodes).start });
        }
        // One device is in each used node. The other devices fill the nodes in order.
        let mut filled = used - nodes;
        let open = (0..nodes).find_map(|node| {
            let mut range = devices.node(node);
            let here = 1 + filled.min(range.len() - 1);
            filled -= here - 1;
            range.nth(here)
        });
        if let (Some(device), Some(behind)) = (open, behind(nodes)) {
            moves.push(Move { before, behind, device });
        }
    }
    moves
}
