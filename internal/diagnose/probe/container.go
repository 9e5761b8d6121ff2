// SPDX-License-Identifier: Apache-2.0

package probe

import "strconv"

// OwnerOf says what processes of this machine are part of.
func OwnerOf(pids []int) Owner {
	words := make([]string, len(pids))
	for i, pid := range pids {
		words[i] = strconv.Itoa(pid)
	}
	return ownerOf(newView(""), words)
}
