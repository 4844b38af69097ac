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
    mount: PathBuf,
    frozen: bool,
}

fn run(words: &[&str]) -> Result<(), String> {
    let (program, arguments) = words.split_first().ok_or("no command")?;
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

impl LoopDisk {
    /// Makes and mounts a file system of `bytes` below `directory`; says why when it cannot.
    pub fn create(directory: &Path, bytes: u64) -> Result<Self, String> {
        let (image, mount) = (directory.join("disk.img"), directory.join("disk"));
        std::fs::create_dir_all(&mount).map_err(|error| error.to_string())?;
        let (image_text, mount_text) = (image.display().to_string(), mount.display().to_string());
        run(&["truncate", "-s", &bytes.to_string(), &image_text])?;
        // Without the part kept for root, full is full for a test that runs as root.
        run(&["mkfs.ext4", "-q", "-F", "-m", "0", &image_text])?;
        run(&["mount", "-o", "loop", &image_text, &mount_text])?;
        Ok(Self {
            image,
            mount,
            frozen: false,
        })
    }

    /// Puts the data of a broker on a disk of its own; says so and gives none where it cannot.
    pub fn under(broker: &mut BrokerProcess, bytes: u64) -> Option<Self> {
        if !is_root() {
            skipped("a disk of the test's own needs root");
            return None;
        }
        match Self::create(broker.root(), bytes) {
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
        run(&["fsfreeze", "-f", &self.mount.display().to_string()]).expect("freeze");
        self.frozen = true;
    }

    /// Lets the blocked writes go on.
    pub fn thaw(&mut self) {
        run(&["fsfreeze", "-u", &self.mount.display().to_string()]).expect("thaw");
        self.frozen = false;
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let mount = self.mount.display().to_string();
        if self.frozen {
            let _ = run(&["fsfreeze", "-u", &mount]);
        }
        let unmounted = (0..50).any(|_| {
            let done = run(&["umount", &mount]).is_ok();
            if !done {
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            done
        });
        if !unmounted {
            let _ = run(&["umount", "-l", &mount]);
        }
        let _ = std::fs::remove_file(&self.image);
    }
}
