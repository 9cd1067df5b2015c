//! The straight pipeline: each device one stage, the slowest stage or transfer as fast as the original finds it.
//!
//! Devices are taken one at a time: the first of a fresh machine, or the next of the first machine that is begun but
//! not full. So `used` devices on `begun` machines are always the same ones, and the search keeps one best pipeline for
//! each such pair and last state, as the original does.

use super::{Devices, Model};

/// A pipeline with one device a stage.
pub(super) struct Chain {
    /// Slowest stage or transfer, for the whole batch.
    pub(super) bottleneck_s: f64,
    /// Last state and device of each stage.
    pub(super) stages: Vec<(usize, u32)>,
}

#[derive(Clone, Copy)]
struct Cell {
    bottleneck_s: f64,
    /// Device of the last stage.
    device: u32,
    /// Last state and begun machines one stage earlier.
    before: (usize, usize),
}

const NONE: Cell = Cell { bottleneck_s: f64::INFINITY, device: 0, before: (0, 0) };

/// The best pipeline over all devices; None if fewer states are nested in each other.
pub(super) fn best(model: &Model, devices: &Devices) -> Option<Chain> {
    let states = model.states.len();
    let machines = devices.machines();
    // cells[used - 1][state * machines + begun - 1]
    let mut cells: Vec<Vec<Cell>> = Vec::with_capacity(devices.count() as usize);
    let mut first = vec![NONE; states * machines];
    for (state, sums) in model.states.iter().enumerate() {
        first[state * machines] = Cell { bottleneck_s: sums.compute_s, ..NONE };
    }
    cells.push(first);
    for used in 1..devices.count() as usize {
        let before = &cells[used - 1];
        let moves = moves(devices, used);
        let mut now = vec![NONE; states * machines];
        for state in 1..states {
            let compute_s = model.states[state].compute_s;
            for cut in model.inside[state].iter().map(|&cut| cut as usize) {
                let stage_s = compute_s - model.states[cut].compute_s;
                let bytes = 2.0 * model.states[cut].output_activation_bytes;
                for &(begun, now_begun, device) in &moves {
                    let from = &before[cut * machines + begun - 1];
                    if from.bottleneck_s == f64::INFINITY {
                        continue;
                    }
                    let transfer_s = devices.split_concat_s(&[from.device], &[device], bytes);
                    let bottleneck_s = from.bottleneck_s.max(stage_s).max(transfer_s);
                    let cell = &mut now[state * machines + now_begun - 1];
                    if bottleneck_s < cell.bottleneck_s {
                        *cell = Cell { bottleneck_s, device, before: (cut, begun) };
                    }
                }
            }
        }
        cells.push(now);
    }
    let (mut state, mut begun) = (states - 1, machines);
    let bottleneck_s = cells.last()?[state * machines + begun - 1].bottleneck_s;
    if bottleneck_s == f64::INFINITY {
        return None;
    }
    let mut stages = Vec::with_capacity(cells.len());
    for level in cells.iter().rev() {
        let cell = &level[state * machines + begun - 1];
        stages.push((state, cell.device));
        (state, begun) = (cell.before.0, cell.before.1.max(1));
    }
    stages.reverse();
    Some(Chain { bottleneck_s, stages })
}

/// Ways to take one more device than `used`: machines begun before, machines begun then, and the device.
fn moves(devices: &Devices, used: usize) -> Vec<(usize, usize, u32)> {
    let machines = devices.machines();
    let mut moves = Vec::new();
    for begun in (1..=machines.min(used)).rev() {
        // One device in each begun machine, the others filled up in order.
        let mut filled = used - begun;
        let mut open = None;
        for machine in 0..begun {
            let mut free = devices.machine(machine);
            let here = 1 + filled.min(free.len() - 1);
            filled -= here - 1;
            open = open.or_else(|| free.nth(here));
        }
        if filled > 0 {
            continue; // more than these machines hold
        }
        if begun < machines {
            moves.push((begun, begun + 1, devices.machine(begun).start));
        }
        if let Some(device) = open {
            moves.push((begun, begun, device));
        }
    }
    moves
}
