//! Lemma *Devices that differ* (docs/proofs.md#devices-that-differ): whatever whole units the speeds count, an entry for n
//! units is not above what the prefix adds in any plan that leaves it devices of n units or fewer.
//!
//! A stage whose slowest device has speed v and whose smallest one has memory m is of *class* (v, m), and each of its devices
//! has at least both. The bound is strong where units are nearly in proportion to speed.

use crate::cost::network::{Cluster, Machine};
use crate::planner::effort::tables;

/// All devices with at least this speed and this memory.
#[derive(Debug, Clone)]
pub(crate) struct DeviceClass {
    pub speed: f64,
    pub memory_bytes: f64,
    /// For each class, whether it has all devices of this one.
    pub parts_of: Vec<bool>,
    /// Devices of the largest node with exactly this speed and memory. `None` if there is none: then a stage of this
    /// class is on several nodes.
    pub widest: Option<u32>,
    pub devices: u32,
}

/// Returns the classes that a stage may have. The first one has all devices, and the others have parts of them.
pub(crate) fn kinds(cluster: &Cluster) -> Vec<DeviceClass> {
    // Each speed with a memory is a kind of its own: so many of them are not even combined.
    let alike =
        |a: &&Machine, b: &&Machine| a.speed.total_cmp(&b.speed).then(a.memory_bytes.total_cmp(&b.memory_bytes));
    let mut types: Vec<&Machine> = cluster.machines.iter().collect();
    types.sort_by(alike);
    types.dedup_by(|b, a| alike(&&**a, &&**b).is_eq());
    if types.len() > tables::MAX_DEVICE_CLASSES {
        return vec![any(cluster)];
    }
    let values = |value: fn(&Machine) -> f64| {
        let mut values: Vec<f64> = cluster.machines.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values
    };
    let (speeds, memories) = (values(|machine| machine.speed), values(|machine| machine.memory_bytes));
    let has = |machine: &Machine, speed: f64, memory: f64| machine.speed >= speed && machine.memory_bytes >= memory;
    let is = |one: f64, other: f64| one.total_cmp(&other).is_eq();
    let mut kinds = Vec::new();
    for &speed in &speeds {
        for &memory_bytes in &memories {
            let those: Vec<&Machine> =
                cluster.machines.iter().filter(|machine| has(machine, speed, memory_bytes)).collect();
            let is_slowest = those.iter().any(|machine| is(machine.speed, speed));
            let is_smallest = those.iter().any(|machine| is(machine.memory_bytes, memory_bytes));
            if is_slowest && is_smallest {
                let own =
                    those.iter().filter(|machine| is(machine.speed, speed) && is(machine.memory_bytes, memory_bytes));
                kinds.push(DeviceClass {
                    speed,
                    memory_bytes,
                    parts_of: Vec::new(),
                    widest: own.map(|machine| machine.devices).max(),
                    devices: those.iter().map(|machine| machine.devices).sum(),
                });
            }
        }
    }
    // The first one has all devices: the slowest with the smallest memory are kinds of some machine or other.
    let all = cluster.devices();
    if kinds.len() > tables::MAX_DEVICE_CLASSES || kinds.first().is_none_or(|kind| kind.devices < all) {
        return vec![any(cluster)];
    }
    let limits: Vec<(f64, f64)> = kinds.iter().map(|kind| (kind.speed, kind.memory_bytes)).collect();
    for kind in &mut kinds {
        kind.parts_of = (limits.iter())
            .map(|&(speed, memory_bytes)| kind.speed >= speed && kind.memory_bytes >= memory_bytes)
            .collect();
    }
    kinds
}

/// Returns all devices as one class of the highest speed and the largest memory.
fn any(cluster: &Cluster) -> DeviceClass {
    DeviceClass {
        speed: cluster.machines.iter().map(|machine| machine.speed).fold(0.0, f64::max),
        memory_bytes: cluster.machines.iter().map(|machine| machine.memory_bytes).fold(0.0, f64::max),
        parts_of: vec![true],
        widest: cluster.machines.iter().map(|machine| machine.devices).max(),
        devices: cluster.devices(),
    }
}

/// Whole numbers of units for speeds, nearly in proportion, so that devices of several speeds are one number.
#[derive(Debug, Clone)]
pub(crate) struct Units {
    /// Speeds, slowest first, and the units of a device of each.
    of_speed: Vec<(f64, u32)>,
}

impl Units {
    /// Returns the units of a cluster. Every device counts 1 if there is a single class.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let mut speeds: Vec<f64> = cluster.machines.iter().map(|machine| machine.speed).collect();
        speeds.sort_by(f64::total_cmp);
        speeds.dedup();
        let fastest = speeds.last().copied().unwrap_or(1.0);
        #[expect(clippy::cast_sign_loss, reason = "speeds are above zero")]
        let whole = |units: f64| (units.round() as u32).max(1);
        let each = |most: u32| Self {
            of_speed: speeds.iter().map(|&speed| (speed, whole(speed / fastest * f64::from(most)))).collect(),
        };
        let mut best = each(1);
        if kinds(cluster).len() == 1 {
            return best;
        }
        let mut least = best.lost(cluster);
        for most in 2..=tables::MAX_UNITS {
            if least <= tables::UNIT_LOSS {
                break;
            }
            let units = each(most);
            let lost = units.lost(cluster);
            if lost < least {
                (best, least) = (units, lost);
            }
        }
        best
    }

    /// Returns the share by which the units overestimate the speed of all devices.
    fn lost(&self, cluster: &Cluster) -> f64 {
        let most = self.of_speed.iter().map(|&(speed, each)| speed / f64::from(each)).fold(0.0, f64::max);
        let speed: f64 = cluster.machines.iter().map(|m| f64::from(m.devices) * m.speed).sum();
        most * f64::from(self.all(cluster)) / speed - 1.0
    }

    /// Returns the units of a device of this speed.
    pub(crate) fn of(&self, speed: f64) -> u32 {
        let at = self.of_speed.partition_point(|&(slower, _)| slower < speed);
        self.of_speed.get(at).map_or(1, |&(_, each)| each)
    }

    /// Returns the units of one device and the number of such devices of a class, fewest units first.
    pub(crate) fn of_kind(&self, cluster: &Cluster, kind: &DeviceClass) -> Vec<(u32, u32)> {
        let has = |machine: &&Machine| machine.speed >= kind.speed && machine.memory_bytes >= kind.memory_bytes;
        let mut each: Vec<(u32, u32)> =
            cluster.machines.iter().filter(has).map(|machine| (self.of(machine.speed), machine.devices)).collect();
        each.sort_unstable();
        each.dedup_by(|b, a| {
            let is_same = a.0 == b.0;
            a.1 += if is_same { b.1 } else { 0 };
            is_same
        });
        each
    }

    /// Returns the units of all devices.
    pub(crate) fn all(&self, cluster: &Cluster) -> u32 {
        cluster.machines.iter().map(|machine| machine.devices * self.of(machine.speed)).sum()
    }
}
