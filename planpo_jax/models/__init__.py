"""Networks: functions of params, with no knowledge of meshes."""
