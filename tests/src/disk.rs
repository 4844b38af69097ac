//! Owns a file system of its own on a loop device, which a test can freeze, fill or turn read-only.
//!
//! Invariant: it is thawed and unmounted when it goes out of scope, whatever the test did to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::BrokerProcess;
use crate::{is_root, skipped};

/// An ext4 file system on a loop device.
#[derive(Debug)]
pub struct LoopDisk {
    image: PathBuf,
    device: String,
    mount: PathBuf,
    frozen: bool,
}

/// Runs a command; what it printed.
fn run(words: &[&str]) -> Result<String, String> {
    let (program, arguments) = words.split_first().ok_or("no command")?;
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!(
        "{}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

impl LoopDisk {
    /// Makes and mounts a file system of `bytes` below `directory`, on a device with sectors of
    /// `sector_bytes`; says why when it cannot.
    pub fn create(directory: &Path, bytes: u64, sector_bytes: u32) -> Result<Self, String> {
        let (image, mount) = (directory.join("disk.img"), directory.join("disk"));
        std::fs::create_dir_all(&mount).map_err(|error| error.to_string())?;
        let image_text = image.display().to_string();
        run(&["truncate", "-s", &bytes.to_string(), &image_text])?;
        let sectors = sector_bytes.to_string();
        let device = run(&["losetup", "-f", "--show", "-b", &sectors, &image_text])?;
        let disk = Self {
            image,
            device,
            mount,
            frozen: false,
        };
        // Without the part kept for root, full is full for a test that runs as root.
        run(&["mkfs.ext4", "-q", "-F", "-m", "0", &disk.device])?;
        disk.mount()?;
        Ok(disk)
    }

    fn mount(&self) -> Result<(), String> {
        let mount = self.mount.display().to_string();
        let options = "errors=remount-ro";
        run(&["mount", "-o", options, &self.device, &mount]).map(drop)
    }

    /// Puts the data of a broker on a disk of its own; says so and gives none where it cannot.
    pub fn under(broker: &mut BrokerProcess, bytes: u64) -> Option<Self> {
        Self::with_sectors(broker, bytes, 512)
    }

    /// The same on a device with sectors of this size.
    pub fn with_sectors(broker: &mut BrokerProcess, bytes: u64, sector: u32) -> Option<Self> {
        if !is_root() {
            skipped("a disk of the test's own needs root");
            return None;
        }
        match Self::create(broker.root(), bytes, sector) {
            Ok(disk) => {
                broker.data_at(&disk.path().join("store"));
                Some(disk)
            }
            Err(reason) => {
                skipped(&format!("no loop disk: {reason}"));
                None
            }
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Lets every write block from now on.
    pub fn freeze(&mut self) {
        let mount = self.mount.display().to_string();
        run(&["fsfreeze", "-f", &mount]).expect("freeze");
        self.frozen = true;
    }

    /// Lets the blocked writes go on.
    pub fn thaw(&mut self) {
        let mount = self.mount.display().to_string();
        run(&["fsfreeze", "-u", &mount]).expect("thaw");
        self.frozen = false;
    }

    /// Reports a fault of the file system to the kernel, which turns it read-only under all files
    /// that are open.
    pub fn turn_read_only(&self) {
        let name = self.device.trim_start_matches("/dev/");
        let trigger = format!("/sys/fs/ext4/{name}/trigger_fs_error");
        std::fs::write(&trigger, "reported by a test").expect("trigger_fs_error");
    }

    /// Repairs it as an administrator would, while nobody uses it, and mounts it again.
    pub fn repair(&mut self) {
        self.unmount().expect("nobody uses it");
        // Status 1 says that something was repaired.
        let _ = run(&["e2fsck", "-f", "-y", &self.device]);
        self.mount().expect("mount");
    }

    fn unmount(&self) -> Result<(), String> {
        let mount = self.mount.display().to_string();
        let mut last = Ok(String::new());
        for _ in 0..50 {
            last = run(&["umount", &mount]);
            if last.is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        last.map(drop)
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let mount = self.mount.display().to_string();
        if self.frozen {
            let _ = run(&["fsfreeze", "-u", &mount]);
        }
        if self.unmount().is_err() {
            let _ = run(&["umount", "-l", &mount]);
        }
        let _ = run(&["losetup", "-d", &self.device]);
        let _ = std::fs::remove_file(&self.image);
    }
}
